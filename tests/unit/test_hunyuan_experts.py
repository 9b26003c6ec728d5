"""Experts of a mixture: routing, dispatch, sums, shares held elsewhere, and their quantised form."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from portable_dit.backend import Backend, ExpertKernel, FusedOp, LinearKernel
from portable_dit.capabilities import Capabilities, ExpertRequest, Reject
from portable_dit.conformance.experts import CASES, check_expert_seams, check_experts
from portable_dit.cpu import CpuBackend
from portable_dit.errors import BackendError, WeightsError
from portable_dit.formats import QuantizedRows, encode, format_named, quantize_blocks
from portable_dit.grouped_products import GroupedRowExperts, grouped_linear
from portable_dit.ops import (
    Dispatch,
    ExpertLinear,
    Experts,
    Router,
    combine_experts,
    deal,
    expert_linear,
    route,
)
from portable_dit.quantize import QuantizedExpertLinear, quantization_report, quantize, quantized_weights
from portable_dit.scaled_products import ScaledRowLinear

CHANNELS, HIDDEN = 32, 16


def filled(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return module.eval()


def rows(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, CHANNELS, generator=torch.Generator().manual_seed(seed))


def one_by_one(experts: Experts, x: Tensor, index: Tensor, shares: Tensor) -> Tensor:
    """Every row through each of its experts on its own, in float64."""
    up, down = experts.gate_and_up_proj.weight.double(), experts.down_proj.weight.double()
    out = torch.zeros_like(x, dtype=torch.float64)
    for row in range(x.shape[0]):
        for expert, share in zip(index[row].tolist(), shares[row].tolist(), strict=True):
            gate, value = (up[expert] @ x[row].double()).chunk(2)
            out[row] += share * (down[expert] @ (F.silu(gate) * value))
    return out


@settings(max_examples=25)
@given(count=st.integers(1, 40), held=st.integers(1, 6), top=st.integers(1, 3), seed=st.integers(0, 1000))
@torch.no_grad()
def test_sorted_dispatch_is_every_row_through_its_experts(count, held, top, seed):
    top = min(top, held)
    experts = filled(Experts(held, CHANNELS, HIDDEN), seed)
    x = rows(count, seed)
    index, shares = filled(Router(CHANNELS, held, top), seed + 1)(x)
    wanted = one_by_one(experts, x, index, shares)
    assert torch.allclose(experts(x, index, shares).double(), wanted, rtol=0, atol=1e-5)


@torch.no_grad()
def test_all_rows_may_choose_one_expert_and_others_none():
    experts = filled(Experts(4, CHANNELS, HIDDEN))
    x, index, shares = rows(10), torch.full((10, 1), 2), torch.ones(10, 1)
    assert torch.allclose(
        experts(x, index, shares).double(), one_by_one(experts, x, index, shares), rtol=0, atol=1e-5
    )


@torch.no_grad()
def test_a_row_does_not_depend_on_who_else_is_in_the_batch():
    experts, router = filled(Experts(4, CHANNELS, HIDDEN)), filled(Router(CHANNELS, 4, 2), 5)
    x = rows(32)
    whole = experts(x, *router(x))
    for part in (slice(0, 1), slice(7, 20)):
        assert torch.allclose(experts(x[part], *router(x[part])), whole[part], rtol=0, atol=1e-6)


def test_the_router_takes_the_largest_shares_and_scales_them_to_one():
    router = filled(Router(CHANNELS, 6, 2))
    x = rows(9)
    index, shares = router(x)
    logits = x @ router.weight.T
    chosen = logits.gather(1, index)
    assert torch.equal(index.sort(dim=1).values, logits.topk(2, dim=1).indices.sort(dim=1).values)
    assert torch.allclose(shares, chosen.softmax(dim=1), rtol=0, atol=1e-6)
    assert (index.dtype, shares.dtype) == (torch.int64, torch.float32)


def test_routing_is_float32_whatever_the_rows_are():
    """Two experts whose logits differ by less than bfloat16 can tell."""
    router = Router(CHANNELS, 2, 1)
    router.weight.data.zero_()
    router.weight.data[0, :2] = torch.tensor([1.0, 2.0**-10])
    router.weight.data[1, :2] = torch.tensor([1.0, 0.0])
    x = torch.zeros(1, CHANNELS, dtype=torch.bfloat16)
    x[0, :2] = 1
    assert router(x)[0].item() == 0


@pytest.mark.parametrize("holders", [2, 3, 6])
@torch.no_grad()
def test_shares_of_the_experts_add_up_to_the_whole(holders):
    whole, router = filled(Experts(6, CHANNELS, HIDDEN)), filled(Router(CHANNELS, 6, 3), 3)
    x = rows(20)
    choice = router(x)
    total, each = torch.zeros_like(x), 6 // holders
    for holder in range(holders):
        part = Experts(6, CHANNELS, HIDDEN)
        for name in ("gate_and_up_proj", "down_proj"):
            layer, stored = getattr(part, name), getattr(whole, name).weight
            layer.hold(holder * each, each)
            layer.weight.data = stored[holder * each : (holder + 1) * each].clone()
        total += part(x, *choice)
    assert torch.allclose(total, whole(x, *choice), rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_holder_that_nobody_chose_adds_nothing():
    part = filled(Experts(8, CHANNELS, HIDDEN))
    for layer in (part.gate_and_up_proj, part.down_proj):
        stored = layer.weight.data[4:]
        layer.hold(4, 4)
        layer.weight.data = stored
    out = part(rows(5), torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2))
    assert torch.equal(out, torch.zeros(5, CHANNELS))


@torch.no_grad()
def test_what_a_kernel_leaves_behind_the_last_end_reaches_nobody():
    part = filled(Experts(4, CHANNELS, HIDDEN))
    choice = torch.tensor([[0, 3], [2, 1], [3, 0]]), torch.full((3, 2), 0.5)
    for layer in (part.gate_and_up_proj, part.down_proj):
        layer.first, layer.num_experts = 1, 2
        layer.weight.data = layer.weight.data[1:3]
    wanted = part(rows(3), *choice)

    def spoilt(x, weight, dispatch):
        out = expert_linear(x, weight, dispatch)
        out[int(dispatch.ends[-1]) :] = float("nan")
        return out

    part.gate_and_up_proj.run = part.down_proj.run = spoilt
    assert torch.equal(part(rows(3), *choice), wanted)
    assert wanted[0].eq(0).all()
    assert wanted[1].ne(0).any()


@pytest.mark.parametrize(("first", "held"), [(0, 64), (0, 16), (48, 16), (5, 1)])
def test_choices_are_dealt_out_as_a_sort_of_their_numbers_does_it(first, held):
    """In the order of rows within an expert, those of experts elsewhere last, to the bit."""
    index = torch.stack(
        [torch.randperm(64, generator=torch.Generator().manual_seed(n))[:8] for n in range(99)]
    )
    dispatch, places = deal(index, first, held, 64)
    here = index - first
    owners, order = torch.where((here >= 0) & (here < held), here, held).flatten().sort(stable=True)
    assert dispatch.rows.tolist() == (order // 8).tolist()
    assert dispatch.ends.tolist() == [int((owners <= expert).sum()) for expert in range(held)]
    assert dispatch.ends.dtype is torch.int32
    assert torch.equal(order[places.flatten()], torch.arange(99 * 8))


def test_both_layers_of_a_mixture_ask_the_device_once_where_rows_end():
    dispatch, _ = deal(torch.tensor([[0, 3], [2, 0]]), 0, 4, 4)
    asked = []

    def make(ends):
        asked.append(ends)
        return ends.tolist()

    assert dispatch.once("counts", make) == dispatch.in_order().once("counts", make) == [2, 2, 3, 4]
    assert len(asked) == 1
    assert dispatch.in_order().rows is None
    assert dispatch.parts() is dispatch.in_order().parts()
    assert dispatch.parts() == [(0, slice(0, 2)), (2, slice(2, 3)), (3, slice(3, 4))]


@torch.no_grad()
def test_torchs_grouped_product_is_expert_after_expert():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 24, CHANNELS, generator=generator)
    for counts in ((3, 0, 5, 2), (0, 0, 0, 10), (10, 0, 0, 0)):
        ends = torch.tensor(counts).cumsum(0).int()
        for picks in (None, torch.randint(0, 10, (10,), generator=generator)):
            dispatch, x = Dispatch(picks, ends), rows(10)
            assert torch.allclose(
                grouped_linear(x, weight, dispatch), expert_linear(x, weight, dispatch), rtol=0, atol=1e-5
            )


def _scaled_grouped_mm(a, b, *, scale_a, scale_recipe_a, scale_b, scale_recipe_b, offs, **options):
    """What torch documents: a [R, K] and b [E, K, N] in e4m3, a scale per row of a and per column of b."""
    assert a.dtype is b.dtype is torch.float8_e4m3fn
    assert a.is_contiguous()
    assert b.stride(1) == 1  # column-major
    assert scale_recipe_a is scale_recipe_b is F.ScalingType.RowWise
    assert (scale_a.shape, scale_b.shape) == ((a.shape[0],), (b.shape[0], b.shape[2]))
    assert offs.dtype is torch.int32
    out = torch.full((a.shape[0], b.shape[2]), float("nan"))
    start = 0
    for expert, end in enumerate(offs.tolist()):
        exact = a[start:end].float() @ b[expert].float()
        out[start:end] = exact * scale_a[start:end, None] * scale_b[expert]
        start = end
    return out.to(options["output_dtype"])


@torch.no_grad()
def test_the_grouped_kernel_computes_what_the_format_says_in_one_call(monkeypatch):
    monkeypatch.setattr(F, "scaled_grouped_mm", _scaled_grouped_mm)

    class Device(CpuBackend):
        def expert_kernels(self):
            return {"fp8_row": (GroupedRowExperts(ScaledRowLinear()),)}

    x = rows(20)
    choice = filled(Router(CHANNELS, 4, 2), 9)(x)
    _, grouped = quantized("fp8_row", "scaled_grouped_mm", Device())
    _, each = quantized("fp8_row", "each_emulated")
    assert torch.allclose(grouped(x, *choice), each(x, *choice), rtol=0, atol=1e-5)
    hidden = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(4))
    dispatch = Dispatch(None, torch.tensor([1, 2, 6, 6], dtype=torch.int32))
    form = format_named("fp8_row")
    values, scales = quantize_blocks(hidden, form, (1, 0))
    ready = QuantizedRows(form, values, scales, tuple(hidden.shape), hidden.dtype)
    assert torch.equal(grouped.down_proj(ready, dispatch), grouped.down_proj(hidden, dispatch))


def test_sums_are_float32_in_bfloat16_too():
    """256 + 1 is 256 in bfloat16; three experts' parts must not vanish one by one."""
    parts = torch.tensor([[256.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    out = combine_experts(parts, torch.arange(4)[None], torch.ones(1, 4))
    assert out.item() == 260.0  # 259 rounded once
    assert out.dtype is torch.bfloat16


# --- quantised ---


def quantized(format: str, kernel_id: str, backend: Backend | None = None) -> tuple[Experts, Experts]:
    """Experts as they were, and quantised."""
    plain, module = filled(Experts(4, CHANNELS, HIDDEN)), nn.Module()
    module.experts = filled(Experts(4, CHANNELS, HIDDEN))
    quantize(
        module,
        format=format,
        keep=(),
        backend=backend or CpuBackend(),
        kernel_id=None,
        expert_kernel_id=kernel_id,
    )
    for name, (layer, expert) in quantized_weights(module).items():
        layer.accept_weight(expert, getattr(plain, name.split(".")[1]).weight[expert])
    return plain, module.experts


@pytest.mark.parametrize("format", ["fp8_row", "fp8_tensor", "int8_row", "mxfp8", "fp8_weight_only"])
@torch.no_grad()
def test_quantised_experts_are_each_expert_quantised_on_its_own(format):
    plain, coded = quantized(format, "plain")
    for name in ("gate_and_up_proj", "down_proj"):
        layer, weight = getattr(coded, name), getattr(plain, name).weight
        assert isinstance(layer, QuantizedExpertLinear)
        kernel = LinearKernel(format)
        for expert in range(4):
            x = torch.randn(3, weight.shape[2], generator=torch.Generator().manual_seed(expert))
            ends = torch.tensor([3 * (other >= expert) for other in range(4)], dtype=torch.int32)
            alone = kernel.apply(x, kernel.pack(encode(weight[expert], format), x.dtype), None)
            assert torch.equal(layer(x, Dispatch(None, ends)), alone)


@torch.no_grad()
def test_quantised_experts_stay_as_near_as_the_format_is():
    x = rows(30)
    choice = filled(Router(CHANNELS, 4, 2), 9)(x)
    for format, kernel_id in (("fp8_row", "each_emulated"), ("int8_row", "each_emulated")):
        plain, coded = quantized(format, kernel_id)
        exact, off = plain(x, *choice), coded(x, *choice) - plain(x, *choice)
        assert 0 < off.norm() / exact.norm() < 0.06


def test_scales_of_an_expert_know_nothing_of_the_others():
    plain, coded = quantized("fp8_row", "plain")
    before = coded.down_proj.packed_scales[1].clone()
    coded.down_proj.accept_weight(2, 1000 * plain.down_proj.weight[2])
    assert torch.equal(coded.down_proj.packed_scales[1], before)


def test_only_complete_experts_count_as_quantised():
    module = nn.Module()
    module.experts = Experts(2, CHANNELS, HIDDEN)
    quantize(
        module, format="fp8_row", keep=(), backend=CpuBackend(), kernel_id=None, expert_kernel_id="plain"
    )
    up, down = module.experts.gate_and_up_proj, module.experts.down_proj
    up.accept_weight(0, torch.ones(2 * HIDDEN, CHANNELS))
    assert quantization_report(module).layers == 0
    up.accept_weight(1, torch.ones(2 * HIDDEN, CHANNELS))
    assert quantization_report(module).layers == 1
    with pytest.raises(WeightsError, match="does not fit its config"):
        down.accept_weight(0, torch.ones(2, 2))


def test_a_mixture_that_is_kept_stays_a_mixture_of_plain_weights():
    module = nn.Module()
    module.experts = Experts(2, CHANNELS, HIDDEN)
    module.other = nn.Linear(CHANNELS, CHANNELS)
    quantize(module, format="fp8_row", keep=("experts",), backend=CpuBackend(), kernel_id="plain")
    assert isinstance(module.experts.down_proj, ExpertLinear)


class Grouped(ExpertKernel):
    """A kernel that takes all experts at once and only multiples of 64."""

    def __init__(self) -> None:
        super().__init__(LinearKernel("fp8_row"), "grouped")

    def check(self, request, capabilities):
        assert isinstance(request, ExpertRequest)
        return (
            Reject("in_features", f"{request.in_features} is no multiple of 64")
            if request.in_features % 64
            else None
        )


class GroupedBackend(CpuBackend):
    def expert_kernels(self):
        return {"fp8_row": (Grouped(),)}


def test_a_backends_own_kernels_come_before_those_that_go_expert_by_expert():
    listed = [kernel.id for kernel in GroupedBackend().kernel_lists().experts["fp8_row"]]
    assert listed == ["grouped", "each_emulated", "plain"]
    assert [k.id for k in CpuBackend().kernel_lists().experts["int8_row"]] == [
        "each_int8_matmul",
        "each_emulated",
        "plain",
    ]


def test_a_kernel_that_refuses_the_experts_is_told_before_anything_is_swapped():
    module = nn.Module()
    module.experts = Experts(2, CHANNELS, HIDDEN)
    capabilities = Capabilities(CpuBackend().devices()[0], 1, frozenset({"float32"}))
    with pytest.raises(BackendError, match=r"'grouped' does not serve 2 layers: experts.gate_and_up_proj"):
        quantize(
            module,
            format="fp8_row",
            keep=(),
            backend=GroupedBackend(),
            kernel_id=None,
            expert_kernel_id="grouped",
            capabilities=capabilities,
        )
    assert isinstance(module.experts.down_proj, ExpertLinear)


# --- the cases that a backend's kernels must pass ---


class Misdealt(ExpertKernel):
    """Gives every expert's rows to the next one."""

    def apply(self, x, packed, dispatch, out_features):
        turned = {name: tensor.roll(-1, 0) for name, tensor in packed.items()}
        return super().apply(x, turned, dispatch, out_features)


class Unpicked(ExpertKernel):
    """Takes the first rows instead of those that were picked."""

    def apply(self, x, packed, dispatch, out_features):
        first = None if dispatch.rows is None else torch.arange(len(dispatch.rows)) % len(x)
        return super().apply(x, packed, Dispatch(first, dispatch.ends), out_features)


@pytest.mark.parametrize(
    ("kernel", "failing"),
    [
        (ExpertKernel, set()),
        (Misdealt, {"even", "uneven", "all_to_one", "picked", "wide"}),
        (Unpicked, {"picked", "wide"}),
    ],
)
def test_the_conformance_cases_tell_a_wrong_kernel_from_a_right_one(kernel, failing):
    backend = CpuBackend()
    device = backend.devices()[0]
    outcomes = check_experts(
        kernel(LinearKernel("int8_row")), backend, device, backend.capabilities(device), "float32", repeats=1
    )
    assert {outcome.case for outcome in outcomes if outcome.status == "fail"} == failing
    assert len(outcomes) == len(CASES)


def test_the_conformance_cases_tell_a_wrong_sum_and_a_wrong_product():
    backend = CpuBackend()
    device = backend.devices()[0]
    arguments = backend, device, backend.capabilities(device), "float32", 1
    for op, wrong in (
        ("route", lambda x, weight, top_k: route(x, weight.flip(0), top_k)),
        ("combine_experts", lambda x, places, shares: combine_experts(x, places.flip(1), shares)),
        ("expert_linear", lambda x, weight, dispatch: expert_linear(x, weight.flip(0), dispatch)),
        ("deal", lambda index, first, held, count: deal(index.flip(1), first, held, count)),
    ):
        assert {o.status for o in check_expert_seams(FusedOp(op, "wrong", wrong), *arguments)} == {"fail"}
