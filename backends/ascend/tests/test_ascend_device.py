"""Finding NPUs and what they claim, by pure functions and recorded machines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from portable_dit_ascend import AscendBackend, device
from portable_dit_ascend.attention import FusedInferAttention, FusionAttention, dropped
from portable_dit_ascend.linear import Int8Linear, Int8WeightLinear, Mxfp8Linear

from portable_dit.capabilities import AttentionRequest, LinearRequest
from portable_dit.catalog import read_spec
from portable_dit.formats import decode, encode
from portable_dit.machine_file import load_machine
from portable_dit.plan import make_plan
from portable_dit.recipe import make_recipe

HOME = Path(__file__).resolve().parents[1]
MACHINES = HOME.parents[1] / "tests" / "data" / "machines"
A2, A3, A5 = (load_machine(MACHINES / f"ascend-{name}.json") for name in ("a2", "a3", "a5"))


@pytest.mark.parametrize(
    ("soc", "arch"),
    [(220, "910B"), (225, "910B"), (240, "310B"), (250, "910_93"), (260, "950"), (271, "950"), (202, "310P")],
)
def test_a_chip_has_the_name_of_its_family(soc, arch):
    assert device.arch_name(soc) == arch


@pytest.mark.parametrize("machine", [A2, A3, A5], ids=["a2", "a3", "a5"])
def test_what_is_claimed_is_what_the_machine_file_says(machine):
    assert device.dtypes(machine.device.arch) == machine.dtypes
    assert device.native_formats(machine.device.arch) == machine.native_formats
    assert not machine.float64
    assert machine.graphs.failure_is_fatal
    assert not machine.collectives.passes_device_id


def explained(tmp_path: Path, version: str | None, module: str = "", **environment: str) -> str:
    """What `absence` says in a process where that torch_npu is installed, with that text as its module."""
    if version is not None:
        info = tmp_path / f"torch_npu-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {version}\n")
        (tmp_path / "torch_npu.py").write_text(module)
    code = "from portable_dit_ascend import device; print(device.devices(), device.absence())"
    path = f"{tmp_path}:{HOME}:{HOME.parents[1]}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.startswith("[] ")
    return done.stdout


THIS = torch.__version__.split("+")[0]


@pytest.mark.parametrize(
    ("version", "module", "words"),
    [
        (None, "", ("not installed", "portable-dit-ascend[npu]")),
        ("1.2.3", "raise SystemExit('must not be imported')", ("works with torch 1.2.3 alone",)),
        (
            THIS,
            "raise ImportError('libhccl.so: cannot open shared object file')",
            ("cannot be imported: libhccl.so", "set_env.sh"),
        ),
        (THIS, "raise RuntimeError('ERR00007: another accelerator is live')", ("ERR00007",)),
    ],
    ids=["missing", "another_torch", "no_cann", "another_accelerator"],
)
def test_why_there_is_no_device_is_told_and_a_release_for_another_torch_is_not_touched(
    version, module, words, tmp_path
):
    said = explained(tmp_path, version, module)
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("kernel", "machine", "request_", "code"),
    [
        (FusedInferAttention(), A2, ("float32", 128, 8, 8, 64), "dtype"),
        (FusedInferAttention(), A2, ("bfloat16", 72, 8, 8, 64), "head_dim"),
        (FusedInferAttention(), A2, ("bfloat16", 528, 8, 8, 64), "head_dim"),
        (FusedInferAttention(), A2, ("bfloat16", 512, 128, 128, 64), "heads"),
        (FusedInferAttention(), A2, ("bfloat16", 128, 8, 8, 64, "causal", True), "lse"),
        (FusionAttention(), A2, ("bfloat16", 800, 8, 8, 64), "head_dim"),
        (FusionAttention(), A2, ("bfloat16", 64, 8, 8, 64, "none", True), "lse"),
    ],
)
def test_attention_refuses_with_the_reason(kernel, machine, request_, code):
    assert kernel.check(AttentionRequest(*request_), machine).code == code


@pytest.mark.parametrize(
    ("kernel", "machine", "request_", "code"),
    [
        (Mxfp8Linear(), A2, ("mxfp8", "bfloat16", 64, 512, 512), "arch"),
        (Mxfp8Linear(), A5, ("mxfp8", "bfloat16", 64, 528, 512), "in_features"),
        (Int8Linear(), A2, ("int8_row", "bfloat16", 64, 65536, 512), "in_features"),
        (Int8Linear(), A2, ("int8_row", "bfloat16", 64, 512, 70000), "out_features"),
        (Int8Linear(), A2, ("int8_row", "float32", 64, 512, 512), "dtype"),
        (Int8WeightLinear(), A2, ("int8_weight_only", "float16", 64, 512, 512), "dtype"),
    ],
)
def test_products_refuse_with_the_reason(kernel, machine, request_, code):
    assert kernel.check(LinearRequest(*request_), machine).code == code


def test_a_mask_is_inverted_and_written_out_for_every_query():
    keep = torch.tensor([[True, True, False], [True, False, False]])
    drop = dropped(keep, 4)
    assert (drop.shape, drop.dtype, drop.is_contiguous()) == ((2, 1, 4, 3), torch.bool, True)
    assert torch.equal(drop[:, 0], (~keep)[:, None, :].expand(2, 4, 3))


@pytest.mark.parametrize("features", [128, 160])
def test_packed_mxfp8_scales_stand_in_pairs_along_k_and_mean_the_stored_weight(features):
    weight = encode(torch.randn(48, features), "mxfp8")
    packed = Mxfp8Linear().pack(weight, torch.bfloat16)
    groups = features // 32
    assert packed["scales"].shape == (-(-groups // 2), 48, 2)
    scales = packed["scales"].transpose(0, 1).reshape(48, -1)[:, :groups]
    values = packed["values"].float() * torch.exp2(scales.float() - 127).repeat_interleave(32, dim=1)
    assert torch.equal(values, decode(weight))


def test_groups_of_the_collectives_take_no_device_id(monkeypatch):
    monkeypatch.setattr(device, "devices", lambda: [A2.device])
    assert AscendBackend().process_group(A2.device) == {"backend": "hccl"}


def test_an_a5_plans_h3_image_in_mxfp8_and_an_a2_expands_it_with_a_note():
    keys = {"model": "h3-image", "weights": "random", "device": {"backend": "ascend"}}
    recipe = make_recipe(keys | {"quantization": {"dit": "mxfp8"}, "offload": {"text_encoder": "layerwise"}})
    for machine, kernel in ((A5, "quant_matmul"), (A2, "plain")):
        plan = make_plan(recipe, read_spec(recipe), machine, AscendBackend().kernel_lists())
        assert plan.choices("dit")["linear:mxfp8"] == kernel
        assert plan.choices("dit")["attention"] == "fused_infer"
        assert any(note.changed for note in plan.notes) == (kernel == "plain")
