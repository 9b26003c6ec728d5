"""Finding XPU devices and what they claim, by pure functions and recorded machines."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mock_vendor.signatures import build, recorded
from portable_dit_xpu import XpuBackend, device, extension
from portable_dit_xpu.attention import FLASH, ONEDNN

from portable_dit import ops
from portable_dit.capabilities import AttentionRequest, FusionRequest
from portable_dit.catalog import read_spec
from portable_dit.machine_file import load_machine
from portable_dit.plan import make_plan
from portable_dit.recipe import make_recipe

HOME = Path(__file__).resolve().parents[1]
MACHINES = HOME.parents[1] / "tests" / "data" / "machines"


def arc_b70(**libraries: str):
    return replace(load_machine(MACHINES / "arc-b70.json"), libraries=libraries)


@pytest.mark.skipif(torch.xpu._is_compiled(), reason="this torch has devices of its own")
def test_a_build_for_other_devices_has_none_and_says_why():
    assert XpuBackend().devices() == []
    assert "built without XPU" in XpuBackend().absence()


@pytest.mark.parametrize(
    ("architecture", "arch"),
    [
        (13136561920, "pvc"),  # as vLLM-Omni tests for a Data Center Max
        ((20 << 22 | 2 << 14) << 8, "bmg"),
        ((20 << 22 | 4 << 14 | 4) << 8, "lnl"),
        ((12 << 22 | 55 << 14 | 8) << 8, "acm"),
        ((35 << 22 | 11 << 14) << 8, "xe35.11"),
        (None, "unknown"),
    ],
)
def test_a_chip_has_the_name_of_its_family(architecture, arch):
    assert device.arch_of(SimpleNamespace(architecture=architecture)) == arch


def properties(major: int, minor: int, *, matrix_units: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        architecture=(major << 22 | minor << 14) << 8,
        has_subgroup_matrix_multiply_accumulate=matrix_units,
        has_fp16=True,
    )


@pytest.mark.parametrize(
    ("it", "version", "formats"),
    [
        (properties(20, 2), (2, 14), {"int8_row"}),
        (properties(12, 71, matrix_units=False), (2, 14), set()),
        (properties(35, 11), (2, 13), {"int8_row", "fp8_row", "fp8_tensor"}),
        (properties(35, 11), (2, 14), {"int8_row", "fp8_row", "fp8_tensor", "mxfp8"}),
    ],
)
def test_formats_are_those_of_the_chip_and_the_version_of_torch(it, version, formats):
    assert device.native_formats(it, version) == formats


def test_without_conversions_or_matrix_units_there_is_no_bfloat16():
    assert "bfloat16" in device.dtypes(properties(20, 2))
    assert device.dtypes(properties(12, 71, matrix_units=False)) == {"float32", "float16"}


@pytest.mark.parametrize(
    ("kernel", "machine", "request_", "code"),
    [
        (FLASH, arc_b70(), ("bfloat16", 72, 8, 8, 64), "head_dim"),
        (FLASH, arc_b70(), ("float32", 64, 8, 8, 64), "dtype"),
        (FLASH, arc_b70(), ("bfloat16", 64, 8, 8, 64, "key_padding"), "mask"),
        (ONEDNN, arc_b70(), ("bfloat16", 584, 8, 8, 64), "head_dim"),
        (ONEDNN, arc_b70(), ("bfloat16", 128, 8, 3, 64), "heads"),
    ],
)
def test_attention_refuses_with_the_reason(kernel, machine, request_, code):
    assert kernel.check(AttentionRequest(*request_), machine).code == code


def test_flash_is_not_offered_where_its_results_were_wrong():
    machine = arc_b70()
    max_card = replace(machine, device=replace(machine.device, arch="pvc"))
    request = AttentionRequest("bfloat16", 128, 8, 8, 64)
    assert FLASH.check(request, machine) is None
    assert FLASH.check(request, max_card).code == "arch"


@pytest.mark.parametrize(
    ("release", "build", "fits"),
    [("2.8.10+xpu", "2.8.0+xpu", True), ("2.8.10+xpu", "2.13.0+xpu", False), ("2.13.1", "2.13.0", True)],
)
def test_the_old_extension_fits_one_torch_alone(release, build, fits):
    assert extension.matches(release, build) == fits


def test_the_old_extensions_norm_is_used_only_where_it_fits():
    (op,) = extension.FUSED_OPS
    request = FusionRequest("rms_norm", "bfloat16", 512)
    assert op.check(request, arc_b70()).code == "library"
    assert op.check(request, arc_b70(**{extension.NAME: "2.13.10"})) is None


def test_the_old_extensions_norm_is_called_as_its_last_release_has_it(monkeypatch):
    """Nothing later will come: the repository is archived."""
    record = recorded(HOME / "signatures", "intel_extension_for_pytorch")
    (name,) = record.functions

    def body(given):
        x = given["hidden_states"].float()
        scale = (x.square().mean(-1, keepdim=True) + given["eps"]).rsqrt()
        return (x * scale * given["weight"]).to(given["hidden_states"].dtype)

    llm = SimpleNamespace(functional=SimpleNamespace(rms_norm=build(record.functions[name], body)))
    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", SimpleNamespace(llm=llm))
    x, weight = torch.randn(2, 5, 16).bfloat16(), torch.randn(16).bfloat16()
    for gain in (weight, None):
        torch.testing.assert_close(extension.rms_norm(x, gain, 1e-6), ops.rms_norm(x, gain, 1e-6))


def test_an_arc_card_plans_h3_image_with_onednn_and_int8_on_its_units():
    keys = {"model": "h3-image", "weights": "random", "device": {"backend": "xpu"}}
    keys |= {"quantization": {"dit": "int8_row"}, "offload": {"text_encoder": "layerwise"}}
    recipe = make_recipe(keys)
    machine = arc_b70()
    plan = make_plan(recipe, read_spec(recipe), machine, XpuBackend().kernel_lists())
    assert {plan.choices(part)["attention"] for part in ("dit", "text_encoder", "vae")} == {"sdpa_onednn"}
    assert plan.choices("dit")["linear:int8_row"] == "int8_mm"
    assert not [note for note in plan.notes if note.changed]


def test_what_is_claimed_of_an_arc_card_is_what_its_machine_file_says():
    machine = load_machine(MACHINES / "arc-b70.json")
    assert machine.native_formats == device.native_formats(properties(20, 2), (2, 13))
    assert not machine.float64
    assert machine.collectives.backend == "xccl"
