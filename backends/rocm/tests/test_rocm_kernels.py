"""What kernels say of requests and chips, and the numbers of e4m3fnuz: pure, without any machine."""

from __future__ import annotations

import pytest
import torch
from portable_dit_rocm import RocmBackend, chips, device
from portable_dit_rocm.attention import AITER_ATTENTION, FLASH_ATTN, SDPA_EFFICIENT, SDPA_FLASH
from portable_dit_rocm.fnuz import to_fnuz
from portable_dit_rocm.fusions import FUSED_OPS
from portable_dit_rocm.linear import AiterLinear, FnuzRowLinear, Mxfp8Linear, RowLinear, TensorLinear

from portable_dit.capabilities import AttentionRequest, FusionRequest, LinearRequest
from portable_dit.catalog import read_spec
from portable_dit.formats import encode
from portable_dit.plan import make_plan
from portable_dit.recipe import Recipe

FULL = {"aiter": "2026.8", "flash_attn": "2.8.3"}


def test_e4m3fnuz_bits_mean_half_of_what_e4m3_bits_mean_and_negative_zero_is_zero():
    bits = torch.arange(256, dtype=torch.uint8)
    values = bits.view(torch.float8_e4m3fn)
    finite = ~values.float().isnan()
    got = to_fnuz(values).float() * 2
    assert torch.equal(got[finite], values.float()[finite])
    assert not to_fnuz(values[finite]).float().isnan().any()
    assert to_fnuz(values).view(torch.uint8)[0x80] == 0


def test_a_fnuz_weight_stands_for_the_stored_numbers():
    weight = encode(torch.randn(48, 64), "fp8_row")
    packed = FnuzRowLinear("scaled_mm_fnuz").pack(weight, torch.bfloat16)
    assert packed["values"].dtype == torch.float8_e4m3fnuz
    again = packed["values"].float() * packed["scales"].t()
    assert torch.equal(again, weight.values.float() * weight.scales)


@pytest.mark.parametrize(
    ("arch", "libraries", "formats"),
    [
        ("gfx90a", {"aiter"}, set()),
        ("gfx1100", set(), set()),
        ("gfx1201", set(), {"fp8_row", "fp8_tensor"}),
        ("gfx942", set(), {"fp8_row", "fp8_tensor"}),
        ("gfx942", {"aiter"}, {"fp8_row", "fp8_tensor", "fp8_block128", "int8_row"}),
        ("gfx950", set(), {"fp8_row", "fp8_tensor", "mxfp8"}),
    ],
)
def test_formats_follow_the_chip_and_the_libraries(arch, libraries, formats):
    assert chips.native_formats(arch, frozenset(libraries)) == formats


@pytest.mark.parametrize("name", ["mi325x", "mi350x"])
def test_recorded_machines_agree_with_the_chip_tables(name, machine):
    recorded = machine(name)
    assert chips.native_formats(recorded.device.arch, frozenset()) == recorded.native_formats
    assert chips.rates(recorded.device.name).compute == recorded.compute
    assert chips.rates(recorded.device.name).bandwidth == recorded.memory_bandwidth
    assert recorded.runtime_bytes == chips.RUNTIME_BYTES


@pytest.mark.parametrize(
    ("kernel", "on", "libraries", "request_", "code"),
    [
        (AITER_ATTENTION, "mi325x", {}, AttentionRequest("bfloat16", 128, 8, 8, 64), "library"),
        (AITER_ATTENTION, "mi325x", FULL, AttentionRequest("float32", 128, 8, 8, 64), "dtype"),
        (AITER_ATTENTION, "mi325x", FULL, AttentionRequest("bfloat16", 264, 8, 8, 64), "head_dim"),
        (
            AITER_ATTENTION,
            "mi325x",
            FULL,
            AttentionRequest("bfloat16", 128, 8, 8, 64, "key_padding"),
            "mask",
        ),
        (FLASH_ATTN, "mi325x", {}, AttentionRequest("bfloat16", 128, 8, 8, 64), "library"),
        (
            FLASH_ATTN,
            "mi325x",
            FULL,
            AttentionRequest("bfloat16", 64, 8, 8, 64, "causal", return_lse=True),
            "lse",
        ),
        (SDPA_FLASH, "mi325x", {}, AttentionRequest("bfloat16", 384, 8, 8, 64), "head_dim"),
        (SDPA_EFFICIENT, "mi325x", {}, AttentionRequest("float32", 512, 8, 8, 64), "head_dim"),
        (RowLinear(), "mi325x", {}, LinearRequest("fp8_row", "bfloat16", 64, 512, 512), "arch"),
        (FnuzRowLinear("f"), "mi350x", {}, LinearRequest("fp8_row", "bfloat16", 64, 512, 512), "arch"),
        (TensorLinear(), "mi350x", {}, LinearRequest("fp8_tensor", "bfloat16", 64, 500, 512), "in_features"),
        (Mxfp8Linear(), "mi350x", {}, LinearRequest("mxfp8", "bfloat16", 64, 512, 528), "out_features"),
        (Mxfp8Linear(), "mi325x", {}, LinearRequest("mxfp8", "bfloat16", 64, 512, 512), "arch"),
        (AiterLinear("fp8_row"), "mi325x", {}, LinearRequest("fp8_row", "bfloat16", 64, 512, 512), "library"),
        (FUSED_OPS[0], "mi325x", FULL, FusionRequest("rms_norm", "bfloat16", 100), "channels"),
        (FUSED_OPS[0], "mi325x", {}, FusionRequest("rms_norm", "bfloat16", 128), "library"),
        (FUSED_OPS[1], "mi325x", FULL, FusionRequest("swiglu", "float32", 128), "dtype"),
    ],
)
def test_a_kernel_refuses_with_the_reason(kernel, on, libraries, request_, code, machine):
    reject = kernel.check(request_, machine(on, **libraries))
    assert reject is not None
    assert reject.code == code


def planned(capabilities, **values):
    recipe = Recipe.model_validate(
        {"model": "h3-image", "weights": "random", "device": {"backend": "rocm"}, **values}
    )
    return make_plan(recipe, read_spec(recipe), capabilities, RocmBackend().kernel_lists())


def test_an_mi325x_runs_aiter_where_it_is_installed_and_torch_where_not(machine):
    full, bare = machine("mi325x", **FULL), machine("mi325x")
    assert planned(full).choices("dit")["attention"] == "aiter"
    assert planned(full, quantization={"dit": "fp8_row"}).choices("dit")["linear:fp8_row"] == "aiter"
    plan = planned(bare, quantization={"dit": "fp8_row"})
    assert plan.choices("dit")["attention"] == "sdpa_flash"
    assert plan.choices("dit")["linear:fp8_row"] == "scaled_mm_fnuz"
    # float32 is what flash kernels do not take.
    assert planned(bare, precision="float32").choices("vae")["attention"] == "sdpa_efficient"
    refused = {r.kernel: r.code for r in plan.refusals if (r.component, r.op) == ("dit", "attention")}
    assert refused["aiter"] == refused["flash_attn"] == "library"


def test_a_named_kernel_that_cannot_serve_is_refused_before_loading(machine):
    from portable_dit.errors import RecipeError

    with pytest.raises(RecipeError, match=r"attention=aiter: .*python -m portable_dit_rocm"):
        planned(machine("mi325x"), attention="aiter")


def test_mxfp8_is_native_on_an_mi350x_and_exactly_expanded_on_an_mi325x_with_a_note(machine):
    new = planned(machine("mi350x"), quantization={"dit": "mxfp8"})
    assert new.choices("dit")["linear:mxfp8"] == "scaled_mm"
    old = planned(machine("mi325x"), quantization={"dit": "mxfp8"})
    assert old.choices("dit")["linear:mxfp8"] == "plain"
    assert any("no matrix unit" in note.text for note in old.notes if note.changed)


def test_graphs_promise_one_replica_one_lane_and_no_collectives(machine):
    limits = machine("mi325x").graphs
    assert limits.supported
    assert {limits.side_streams, limits.collectives, limits.concurrent_replay} == {False}


@pytest.mark.skipif(torch.version.hip is not None, reason="this torch is a ROCm build")
def test_another_build_of_torch_has_no_devices_and_is_told_what_to_install():
    assert RocmBackend().devices() == []
    assert "built without ROCm" in device.absence()
