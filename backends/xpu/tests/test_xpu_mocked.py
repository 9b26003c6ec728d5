"""The engine and the suite on mocked machines with Intel GPUs: pictures, claims, faults that are seen."""

from __future__ import annotations

import json

from mock_vendor.mutants import assert_all_seen
from mock_vendor.pictures import assert_all_draw_as_the_host, assert_draws_as_the_host, write_tiny
from mock_vendor.process import Mutation

KERNELS = ("identity", "attention", "linear", "fused", "rng", "transfer", "graphs")
STREAMED = {"offload__dit": "layerwise", "offload__text_encoder": "layerwise", "offload__vae": "component"}
CAPTURED = {"graphs__dit": "true", "graphs__vae": "true"}


EXACT = {"precision": "float32"}


def quantized(format: str) -> dict[str, str]:
    return {"precision": "bfloat16", "quantization__dit": format}


def test_an_arc_card_draws_the_hosts_picture_from_the_command_line(xpu_machine):
    said = assert_draws_as_the_host(xpu_machine("bmg"), precision="float32")
    assert said["kernels"]["dit"]["attention"] == "sdpa_onednn"
    assert (said["backend"], said["device"]) == ("xpu", "Intel(R) Arc(TM) Pro B70 Graphics")


def test_an_arc_card_draws_streamed_captured_and_quantised_and_each_tiny_checkpoint(xpu_machine, tmp_path):
    formats = "int8_row", "fp8_row"
    wishes = [EXACT | STREAMED, EXACT | CAPTURED, *map(quantized, formats)]
    models = {name: write_tiny(name, tmp_path / name) for name in ("h3-image", "hunyuan-image-3")}
    _, captured, int8, fp8, *_ = assert_all_draw_as_the_host(xpu_machine("bmg"), wishes, models=models)
    assert not [note for note in captured["notes"] if "eager" in note]
    assert int8["kernels"]["dit"]["linear:int8_row"] == "int8_mm"
    assert fp8["kernels"]["dit"]["linear:fp8_row"] == "plain"
    assert [note for note in fp8["notes"] if "no matrix unit" in note]


def test_a_chip_with_fp8_units_multiplies_in_them(xpu_machine):
    formats = "fp8_row", "mxfp8"
    drawn = assert_all_draw_as_the_host(xpu_machine("xe35+torch2.14"), list(map(quantized, formats)))
    for format, said in zip(formats, drawn, strict=True):
        assert said["kernels"]["dit"][f"linear:{format}"] == "scaled_mm"
        assert not [note for note in said["notes"] if "no matrix unit" in note]


def test_everything_that_is_claimed_is_kept(xpu_machine):
    machine = xpu_machine("bmg")
    file = machine.folder / "conformance.json"
    chosen = [part for name in KERNELS for part in ("--only", name)]
    done = machine.command("conformance", "xpu", *chosen, "--repeats", "1", "--json", file)
    assert done.returncode == 0, done.stderr
    assert json.loads(file.read_text())["ok"]


def test_graphs_are_not_claimed_before_the_torch_that_has_them(xpu_machine):
    machine = xpu_machine("bmg+torch2.10")
    done = machine.command(
        "run", "--backend", "xpu", "--set", "graphs.vae=true", "--prompt", "x", "-o", "x.png"
    )
    assert done.returncode == 2
    assert "captures no graphs" in done.stderr


def test_an_integrated_gpu_leaves_offload_out_and_says_so(xpu_machine):
    said = assert_draws_as_the_host(xpu_machine("mtl"), precision="float32", **STREAMED)
    assert any("shares the host's memory" in note for note in said["notes"])


def test_every_fault_in_the_package_is_seen(xpu_machine):
    attention = [
        Mutation("attention.py", "SDPBackend.OVERRIDEABLE", "SDPBackend.MATH", "attention", "sdpa_onednn"),
        Mutation("attention.py", ", masks=MASKS_IN_PIECES)", ")", "attention", "sdpa_flash"),
        Mutation("attention.py", "(64, 96, 128, 192)", "(64, 72, 96, 128, 192)", "attention", "sdpa_flash"),
    ]
    fast = "(ScaledRowLinear(fast_accumulation=True),)"  # which these devices do not have
    linear = [Mutation("backend.py", "(ScaledRowLinear(),)", fast, "linear", "scaled_mm")]
    assert_all_seen(xpu_machine("xe35+torch2.14"), [*attention, *linear])


def test_every_call_binds_to_every_recorded_version_of_torch(xpu_machine):
    """After the others of this file, whose calls are looked at."""
    machines = [xpu_machine(variant) for variant in ("bmg", "xe35+torch2.14")]
    assert not [reason for machine in machines for reason in machine.unbound_calls()]
    called = set.union(*(machine.called() for machine in machines))
    wanted = {"aten::scaled_dot_product_attention", "aten::_int_mm", "aten::_scaled_mm_v2", "torch.xpu.graph"}
    assert wanted <= called
