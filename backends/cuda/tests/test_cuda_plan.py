"""Plans for machines that are not here, with this backend's kernels."""

from __future__ import annotations

import pytest
from portable_dit_cuda import CudaBackend

from portable_dit.catalog import read_spec
from portable_dit.plan import make_plan
from portable_dit.recipe import Recipe

FULL = {"fa3_fwd": "0.0.3", "triton": "3.6.0"}


def planned(capabilities, **values):
    recipe = Recipe.model_validate(
        {"model": "h3-image", "weights": "random", "device": {"backend": "cuda"}, **values}
    )
    return make_plan(recipe, read_spec(recipe), capabilities, CudaBackend().kernel_lists())


def refused(plan, component: str, op: str) -> dict[str, str]:
    return {r.kernel: r.code for r in plan.refusals if (r.component, r.op) == (component, op)}


def test_an_h200_runs_fp8_products_fa3_and_fused_seams(machine):
    plan = planned(machine("h200", **FULL), quantization={"dit": "fp8_row"})
    chosen = plan.choices("dit")
    assert chosen["attention"] == "fa3"
    assert chosen["linear:fp8_row"] == "scaled_mm"
    assert {
        chosen[op] for op in ("norm_modulate", "head_norm_rotary", "swiglu", "gated_residual", "rms_norm")
    } == {"triton"}
    said = refused(plan, "dit", "attention")
    assert said["fa4"] == "arch"
    assert said["fa3_fp8"] == "approximate"
    assert said["sage"] == "library"
    assert not [note for note in plan.notes if note.changed]


def test_without_the_wheel_an_h200_runs_cudnn_and_says_why(machine):
    plan = planned(machine("h200"))
    assert plan.choices("dit")["attention"] == "sdpa_cudnn"
    assert refused(plan, "dit", "attention")["fa3"] == "library"
    assert plan.choices("dit")["norm_modulate"] == "plain"
    assert refused(plan, "dit", "norm_modulate") == {"triton": "library"}


def test_attention_in_fp8_runs_when_it_is_named(machine):
    assert planned(machine("h200", **FULL), attention="fa3_fp8").choices("dit")["attention"] == "fa3_fp8"


def test_cudnns_attention_in_fp8_runs_when_it_is_named_and_its_frontend_is_there(machine):
    there = machine("h200", **FULL, nvidia_cudnn_frontend="1.32.0")
    assert planned(there).choices("dit")["attention"] == "fa3"
    assert planned(there, attention="cudnn_fp8").choices("dit")["attention"] == "cudnn_fp8"
    assert refused(planned(there), "dit", "attention")["cudnn_fp8"] == "approximate"
    assert refused(planned(machine("h200")), "dit", "attention")["cudnn_fp8"] == "library"


def test_flashinfer_stands_behind_torchs_own_product(machine):
    there = machine("b200", triton="3.6.0", flashinfer_python="0.7.4")
    plan = planned(there, quantization={"dit": "mxfp8"})
    assert plan.choices("dit")["linear:mxfp8"] == "scaled_mm"


def test_a_named_kernel_that_cannot_serve_is_refused_before_loading(machine):
    from portable_dit.errors import RecipeError

    with pytest.raises(RecipeError, match=r"attention=fa4: .*compute capability 10\.0"):
        planned(machine("h200", **FULL), attention="fa4")


def test_mxfp8_is_native_on_blackwell_and_exactly_expanded_on_an_h200_with_a_note(machine):
    new = planned(machine("rtx-5090", triton="3.6.0"), quantization={"dit": "mxfp8"})
    assert new.choices("dit")["linear:mxfp8"] == "scaled_mm"
    old = planned(machine("h200", **FULL), quantization={"dit": "mxfp8"})
    assert old.choices("dit")["linear:mxfp8"] == "dequantize"
    assert refused(old, "dit", "linear:mxfp8") == {"scaled_mm": "arch", "flashinfer": "arch"}
    assert any("no matrix unit" in note.text for note in old.notes if note.changed)


@pytest.mark.parametrize("name", ["h100", "h200", "rtx-5090"])
def test_every_component_has_fused_attention_on_every_recorded_card(name, machine):
    plan = planned(machine(name))
    chosen = {component: plan.choices(component)["attention"] for component in ("dit", "text_encoder", "vae")}
    assert set(chosen.values()) == {"sdpa_cudnn"}
    full = planned(machine(name), precision="float32")  # which cuDNN and flash do not take
    assert full.choices("vae")["attention"] == "sdpa_efficient"
