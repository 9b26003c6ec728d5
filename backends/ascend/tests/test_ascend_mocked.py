"""The engine and the suite on mocked machines with NPUs: whole pictures, claims, faults that are seen."""

from __future__ import annotations

import json

from mock_vendor.mutants import assert_all_seen
from mock_vendor.pictures import assert_all_draw_as_the_host, assert_draws_as_the_host, write_tiny
from mock_vendor.process import Mutation

KERNELS = ("identity", "attention", "linear", "fused", "rng", "transfer", "graphs")
STREAMED = {"offload__dit": "layerwise", "offload__text_encoder": "layerwise", "offload__vae": "component"}


EXACT = {"precision": "float32"}


def quantized(format: str) -> dict[str, str]:
    return {"precision": "bfloat16", "quantization__dit": format}


def test_an_a2_draws_the_hosts_picture_from_the_command_line(ascend_machine):
    said = assert_draws_as_the_host(ascend_machine("a2"), precision="float32")
    dit = said["kernels"]["dit"]
    assert dit["attention"] == "fusion"
    assert {dit[op] for op in ("norm_modulate", "head_norm_rotary", "swiglu", "rms_norm")} == {"npu"}


def test_an_a2_draws_streamed_and_quantised_and_each_tiny_checkpoint(ascend_machine, tmp_path):
    wishes = [EXACT | STREAMED, *map(quantized, ("int8_row", "int8_weight_only", "mxfp8"))]
    models = {name: write_tiny(name, tmp_path / name) for name in ("h3-image", "hunyuan-image-3")}
    said = assert_all_draw_as_the_host(ascend_machine("a2"), wishes, models=models)
    _, int8, weights, mxfp8, *_ = (one["kernels"]["dit"] for one in said)
    assert int8["attention"] == "fused_infer"
    assert int8["linear:int8_row"] == "quant_matmul"
    assert weights["linear:int8_weight_only"] == "weight_quant_matmul"
    assert mxfp8["linear:mxfp8"] == "plain"


def test_an_a5_multiplies_mxfp8_in_its_units_and_captures_the_denoise_step(ascend_machine):
    wishes = [quantized("mxfp8"), {"precision": "bfloat16", "graphs__dit": "true"}]
    mxfp8, captured = assert_all_draw_as_the_host(ascend_machine("a5"), wishes)
    assert mxfp8["kernels"]["dit"]["linear:mxfp8"] == "quant_matmul"
    assert not [note for note in captured["notes"] if "runs eagerly" in note]


def test_everything_that_is_claimed_is_kept(ascend_machine):
    machine = ascend_machine("a5")
    file = machine.folder / "conformance.json"
    chosen = [part for name in KERNELS for part in ("--only", name)]
    done = machine.command("conformance", "ascend", *chosen, "--repeats", "1", "--json", file)
    assert done.returncode == 0, done.stderr
    assert json.loads(file.read_text())["ok"]


def test_a_chip_that_is_not_known_is_refused_kernel_by_kernel(ascend_machine):
    done = ascend_machine("310p").command("plan", "--backend", "ascend", "--json")
    said = json.loads(done.stdout)
    codes = {refusal["kernel"]: refusal["code"] for refusal in said["refusals"]}
    assert codes["fusion"] == codes["npu"] == "arch"
    assert said["dtype"]["dit"] == "float32"


CAPTURED = ("--set", "graphs.vae=true", "--set", "precision=float32", "--size", "256x256", "--prompt", "x")


def test_what_cannot_be_captured_is_found_before_the_capture_and_runs_eagerly(ascend_machine, tmp_path):
    done = ascend_machine("a2").command("run", "--backend", "ascend", *CAPTURED, "-o", tmp_path / "x.png")
    assert done.returncode == 0, done.stderr
    assert "npu_fusion_attention cannot be captured" in done.stderr


def test_a_capture_that_fails_ends_the_process_with_what_to_do(ascend_machine, tmp_path):
    machine = ascend_machine("a2")
    unguarded = machine.mutated(Mutation("attention.py", "if _being_captured.get():", "if False:", "graphs"))
    done = machine.command(
        "run", "--backend", "ascend", *CAPTURED, "-o", tmp_path / "x.png", source=unguarded
    )
    assert done.returncode != 0
    assert "--enforce-eager" in done.stderr
    assert not (tmp_path / "x.png").exists()


NO_SCALE = "num_key_value_heads=k.shape[2],\n            scale=scale,", "num_key_value_heads=k.shape[2],"
FAULTS = (
    ("fused_infer", "(~keep)[:, None, None, :]", "keep[:, None, None, :]"),  # not inverted
    ("fused_infer", ".expand(-1, 1, rows_q, -1).contiguous()", ""),  # left to broadcast
    ("fused_infer", *NO_SCALE),
    ("fused_infer", 'LAYOUT = "BSND"', 'LAYOUT = "BNSD"'),
    ("fused_infer", "PLAIN, RIGHT_DOWN_CAUSAL = 0, 3", "PLAIN, RIGHT_DOWN_CAUSAL = 0, 0"),
    ("fusion", "atten_mask=drop,\n            scale=scale,", "atten_mask=drop,"),
    # int8 comes out
    ("quant_matmul", "            bias=bias,\n            output_dtype=dtype,", "            bias=bias,"),
    ("quant_matmul", 'weight.values.t().contiguous(), "scales"', 'weight.values, "scales"'),
    ("quant_matmul", 'dst_type=type_number("float8_e4m3fn"),', ""),  # 4 bits come out
    ("quant_matmul", ".transpose(0, 1).contiguous()", ""),
    ("quant_matmul", "None if bias is None else bias.float()", "bias"),
    ("quant_matmul", "group_sizes=[1, 1, BLOCK]", "group_sizes=None"),
    ("weight_quant_matmul", 'mul_(packed["scales"])', "mul_(1.0)"),
    ("npu", 'rotary_mode="half"', 'rotary_mode="interleave"'),
    ("npu", "epsilon=eps", "epsilon=1e-2"),
    (
        "npu",
        "torch.cat([out, x[..., turned:]], dim=-1)",
        "torch.cat([out, out[..., turned - 128 :]], dim=-1)",
    ),
)
PLACES = {
    "fused_infer": ("attention.py", "attention"),
    "fusion": ("attention.py", "attention"),
    "quant_matmul": ("linear.py", "linear"),
    "weight_quant_matmul": ("linear.py", "linear"),
    "npu": ("fusions.py", "fused"),
}


def test_every_fault_in_the_package_is_seen(ascend_machine):
    faults = [Mutation(PLACES[id][0], old, new, PLACES[id][1], id) for id, old, new in FAULTS]
    assert_all_seen(ascend_machine("a5"), faults)


def test_every_call_binds_to_every_recorded_version_of_torch_npu(ascend_machine):
    """After the others of this file, whose calls are looked at."""
    machines = [ascend_machine(variant) for variant in ("a2", "a5")]
    assert not [reason for machine in machines for reason in machine.unbound_calls()]
    called = set.union(*(machine.called() for machine in machines))
    from mock_ascend import BODIES

    assert {*BODIES, "npu::npu_dynamic_mx_quant"} <= called
