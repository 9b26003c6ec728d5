"""Kernels for mixtures of experts: which machine gets which, and that a model's parts ask for them."""

from __future__ import annotations

import pytest
import torch
from portable_dit_cuda import experts
from portable_dit_cuda.backend import CudaBackend

from portable_dit import ops
from portable_dit.capabilities import ExpertRequest, FusionRequest
from portable_dit.formats import encode
from portable_dit.models import read_spec
from portable_dit.plan import make_plan
from portable_dit.recipe import Recipe
from portable_dit.scaled_products import MatrixUnitLinear

SPEC = read_spec("hunyuan-image-3", "random")
SHAPE = ExpertRequest("fp8_row", "bfloat16", 8194, 64, 4096, 6144)


def choices(capabilities, **quantization) -> dict[str, str]:
    recipe = Recipe(
        model="hunyuan-image-3", weights="random", precision="bfloat16", quantization=quantization
    )
    return dict(make_plan(recipe, SPEC, capabilities, CudaBackend().kernel_lists()).choices("dit"))


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("h200", "scaled_grouped_mm"),
        ("h100", "scaled_grouped_mm"),
        ("b200", "each_scaled_mm"),
        ("rtx-pro-6000", "each_scaled_mm"),
        ("a100-80gb", "each_emulated"),
    ],
)
def test_experts_in_fp8_get_the_grouped_product_where_torch_builds_it(machine, name, kernel):
    assert choices(machine(name), dit="fp8_row")["experts:fp8_row"] == kernel


def test_with_triton_experts_in_fp8_get_the_tiled_product_on_the_chip_it_is_tuned_for(machine):
    assert choices(machine("h200", triton="3.6.0"), dit="fp8_row")["experts:fp8_row"] == "tiled_mm"
    assert choices(machine("b200", triton="3.6.0"), dit="fp8_row")["experts:fp8_row"] == "each_scaled_mm"


def test_tiles_start_anew_with_each_expert():
    counts = torch.tensor([130, 0, 1, 300])
    expert, first, count = experts.tiles_of_rows(counts.cumsum(0).int(), int(counts.sum()))
    used = slice(int(count))
    assert expert[used].tolist() == [0, 0, 2, 3, 3, 3]
    assert first[used].tolist() == [0, 128, 130, 131, 259, 387]
    assert len(expert) >= 6
    assert int(experts.tiles_of_rows(torch.zeros(4, dtype=torch.int32), 0)[2]) == 0


def test_dense_layers_and_seams_get_theirs_beside(machine):
    found = choices(machine("h200", triton="3.6.0"), dit="fp8_row")
    assert found["linear:fp8_row"] == "scaled_mm"
    assert [found[op] for op in ("rms_norm", "rotary_head_norm", "swiglu", "combine_experts")] == [
        "triton"
    ] * 4
    assert found["route"] == "matrix_units"
    assert choices(machine("h200"))["expert_linear"] == "grouped_mm"
    assert choices(machine("a100-80gb"))["expert_linear"] == "plain"
    assert choices(machine("h200"))["combine_experts"] == "plain"  # without Triton


def test_attention_of_slots_and_image_takes_no_mask_of_all_by_all(machine):
    found = choices(machine("h200", fa3_fwd="0.0.3"), dit="fp8_row")
    assert found["attention"] == "fa3"


def test_a_shape_that_the_matrix_units_refuse_is_refused(machine):
    kernel = experts.expert_kernels()["fp8_row"][0]
    with_triton = machine("h200", triton="3.6.0")
    assert kernel.check(SHAPE, with_triton) is None
    odd = ExpertRequest("fp8_row", "bfloat16", 8194, 64, 4100, 6144)
    assert kernel.check(odd, with_triton).code == "in_features"
    assert kernel.check(SHAPE, machine("b200", triton="3.6.0")).code == "arch"
    assert kernel.check(SHAPE, machine("h200")).code == "library"


def test_the_plain_grouped_product_needs_a_chip_that_has_it(machine):
    grouped = next(op for op in experts.EXPERT_OPS if op.op == "expert_linear")
    request = FusionRequest("expert_linear", "bfloat16", 4096)
    assert grouped.check(request, machine("h100")) is None
    assert grouped.check(request, machine("rtx-4090")).code == "arch"
    assert grouped.check(FusionRequest("expert_linear", "float32", 4096), machine("h100")).code == "dtype"


def test_rows_are_quantised_as_the_dense_kernel_does_it():
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    ours = experts.RowLinear().quantize_input(x)
    dense = CudaBackend().linear_kernel("fp8_row", "scaled_mm").quantize_input(x)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(ours, dense, strict=True))


def test_what_an_expert_holds_starts_at_a_multiple_of_16_bytes():
    """cuBLAS refuses scales that do not, and experts lie one behind the other."""
    for name, kernels in CudaBackend().linear_kernels().items():
        weight = encode(torch.randn(256, 384, generator=torch.Generator().manual_seed(0)), name)
        for kernel in kernels:
            if isinstance(kernel, MatrixUnitLinear):
                packed = kernel.pack(weight, torch.bfloat16)
                assert {tensor.nbytes % 16 for tensor in packed.values()} == {0}, (name, kernel.id)


def test_every_op_stands_for_a_seam_of_its_name():
    seams = {seam.op for seam in vars(ops).values() if isinstance(seam, type) and hasattr(seam, "op")}
    assert {op.op for op in experts.EXPERT_OPS} <= seams
