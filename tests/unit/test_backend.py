"""The cpu backend passes the conformance cases, and the cases catch kernels that are wrong as usual."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from portable_dit import ops
from portable_dit.backend import AttentionKernel, Backend, EmulatedLinear, FusedOp, Lane, LinearKernel, Packed
from portable_dit.capabilities import (
    AttentionRequest,
    Capabilities,
    Device,
    FusionRequest,
    LinearRequest,
)
from portable_dit.conformance import attention, fused, linear
from portable_dit.conformance.outcome import Outcome, worst_row_error
from portable_dit.cpu import CpuBackend
from portable_dit.errors import BackendError
from portable_dit.formats import Encoded, decode, quantize_blocks
from portable_dit.masks import NO_MASK, Causal, KeyPadding, Mask, to_keep

BACKEND = CpuBackend()
DEVICE = BACKEND.devices()[0]
# As if the processor had everything: the kernels are right on any processor, only not always fast.
FULL = dataclasses.replace(
    BACKEND.capabilities(DEVICE),
    dtypes=frozenset({"float32", "bfloat16"}),
    native_formats=frozenset({"int8_row"}),
)
LISTS = BACKEND.kernel_lists()
DTYPES = ("float32", "bfloat16")
LINEAR = [k for kernels in LISTS.linear.values() for k in kernels]
FUSED = [k for kernels in LISTS.fused.values() for k in kernels]


def failures(outcomes: list[Outcome]) -> list[str]:
    return [f"{o.case}: {o.detail}" for o in outcomes if o.status == "fail"]


def tried(outcomes: list[Outcome]) -> int:
    return sum(o.status != "not_claimed" for o in outcomes)


# --- the cpu backend passes ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", LISTS.attention, ids=lambda k: k.id)
def test_attention_kernels_match_float64(kernel: Any, dtype: str) -> None:
    outcomes = attention.check_attention(kernel, BACKEND, DEVICE, FULL, dtype)
    assert not failures(outcomes)
    assert tried(outcomes) == (0 if (kernel.id, dtype) == ("matmul", "float32") else len(attention.CASES))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", LINEAR, ids=lambda k: f"{k.format.name}-{k.id}")
def test_linear_kernels_match_float64(kernel: Any, dtype: str) -> None:
    outcomes = linear.check_linear(kernel, BACKEND, DEVICE, FULL, dtype)
    assert not failures(outcomes)
    assert tried(outcomes) == len(linear.CASES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", FUSED, ids=lambda k: k.op)
def test_fused_ops_match_float64(kernel: Any, dtype: str) -> None:
    outcomes = fused.check_fused(kernel, BACKEND, DEVICE, FULL, dtype)
    assert not failures(outcomes)
    assert tried(outcomes) >= 7 * (dtype in kernel.dtypes)


def test_the_plain_bodies_of_the_base_class_pass_too() -> None:
    assert not failures(attention.check_attention(AttentionKernel(), Backend(), DEVICE, FULL, "float32"))
    assert not failures(linear.check_linear(LinearKernel("mxfp8"), Backend(), DEVICE, FULL, "float32"))


def test_matmul_attention_in_many_chunks_is_the_same_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = BACKEND.attention_kernel("matmul")
    q, k, v = (torch.randn(2, 200, 4, 32, dtype=torch.bfloat16) for _ in range(3))
    keep = torch.rand(2, 200) > 0.5
    for mask in (NO_MASK, Causal(), KeyPadding(keep)):
        whole = kernel.run(q, k, v, mask, scale=0.2)
        monkeypatch.setattr("portable_dit.cpu.CHUNK_BYTES", 1)
        parts = kernel.run(q, k, v, mask, scale=0.2)
        monkeypatch.undo()
        torch.testing.assert_close(parts, whole, rtol=2**-7, atol=2**-8)


def test_the_log_sum_exp_merges_two_halves_of_the_keys() -> None:
    kernel = AttentionKernel()
    q, k, v = (torch.randn(1, 20, 2, 16) for _ in range(3))
    whole, lse = kernel.run_with_lse(q, k, v, NO_MASK, scale=0.3)
    halves = [
        kernel.run_with_lse(q, k[:, p], v[:, p], NO_MASK, scale=0.3) for p in (slice(7), slice(7, None))
    ]
    weights = torch.stack([part for _, part in halves]).softmax(dim=0)  # [2, B, N, Sq]
    merged = sum(out * w.transpose(1, 2)[..., None] for (out, _), w in zip(halves, weights, strict=True))
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(torch.logaddexp(halves[0][1], halves[1][1]), lse)


# --- wrong kernels are caught ---


def keep_of(mask: Mask, q: Tensor, k: Tensor) -> Tensor | None:
    return to_keep(mask, q.shape[1], k.shape[1], q.device)


def sdpa(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, scale: float, causal: bool = False) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, keep, is_causal=causal, scale=scale, enable_gqa=gqa)
    return out.transpose(1, 2)


def inverted_mask(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
    keep = keep_of(mask, q, k)
    return sdpa(q, k, v, None if keep is None else ~keep, scale)


def mask_dropped(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
    return sdpa(q, k, v, None, scale)


def causal_from_the_first_key(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
    if isinstance(mask, Causal):
        return sdpa(q, k, v, None, scale, causal=True)
    return sdpa(q, k, v, keep_of(mask, q, k), scale)


def scale_dropped(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
    return sdpa(q, k, v, keep_of(mask, q, k), 1.0)


def scale_from_the_head_size(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
    return sdpa(q, k, v, keep_of(mask, q, k), q.shape[-1] ** -0.5)


def test_the_plain_bodys_scores_are_float32_whatever_the_inputs_are() -> None:
    """Scores rounded to bfloat16 are off by a tenth here: one step at 30 is an eighth."""
    case = next(case for case in attention.CASES if case.name == "large_scores")
    q, k, v = attention.inputs(case, torch.bfloat16)
    plain = ops.attention(q, k, v, NO_MASK, scale=case.real_scale)
    rounded = torch.einsum("bqnd,bknd->bnqk", q, k).float().mul(case.real_scale).softmax(dim=-1)
    with_rounded = torch.einsum("bnqk,bknd->bqnd", rounded.to(v.dtype), v)
    wanted = attention.oracle(case, torch.bfloat16)
    assert worst_row_error(plain, wanted) < 0.01 < worst_row_error(with_rounded, wanted)


def heads_shared_in_turn(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    return sdpa(q, k.repeat(1, 1, groups, 1), v.repeat(1, 1, groups, 1), keep_of(mask, q, k), scale)


def nan_where_nothing_is_seen(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
    keep = keep_of(mask, q, k)
    bias = None if keep is None else torch.zeros_like(keep, dtype=q.dtype).masked_fill(~keep, -torch.inf)
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) * scale
    return torch.einsum("bnqk,bknd->bqnd", (scores if bias is None else scores + bias).softmax(-1), v)


def mean_where_nothing_is_seen(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
    keep = keep_of(mask, q, k)
    bias = None if keep is None else torch.zeros_like(keep, dtype=q.dtype).masked_fill(~keep, -1e30)
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) * scale
    return torch.einsum("bnqk,bknd->bqnd", (scores if bias is None else scores + bias).softmax(-1), v)


def overflowing_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    weights = (torch.einsum("bqnd,bknd->bnqk", q, k) * scale).exp()
    keep = keep_of(mask, q, k)
    weights = weights if keep is None else weights * keep
    total = weights.sum(-1, keepdim=True).clamp_min(1e-30)
    return torch.einsum("bnqk,bknd->bqnd", weights / total, v)


def computed_in_bfloat16(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
    out = sdpa(q.bfloat16(), k.bfloat16(), v.bfloat16(), keep_of(mask, q, k), scale)
    return out.to(q.dtype)


def another_dtype(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
    return AttentionKernel().run(q, k, v, mask, scale=scale).double()


def assumes_contiguous(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
    again = [torch.as_strided(t, t.shape, torch.empty(t.shape).stride()) for t in (q, k, v)]
    return AttentionKernel().run(*again, mask, scale=scale)


@pytest.mark.parametrize(
    ("wrong", "cases"),
    [
        (inverted_mask, {"key_padding", "causal", "full_spans", "segments"}),
        (mask_dropped, {"key_padding", "causal", "full_spans", "segments"}),
        (causal_from_the_first_key, {"causal_fewer_queries", "causal_more_queries"}),
        (scale_dropped, {"plain", "own_scale"}),
        (scale_from_the_head_size, {"own_scale"}),
        (heads_shared_in_turn, {"shared_key_heads"}),
        (nan_where_nothing_is_seen, {"nothing_to_see", "causal_more_queries"}),
        (mean_where_nothing_is_seen, {"nothing_to_see", "causal_more_queries"}),
        (overflowing_softmax, {"large_scores"}),
        (computed_in_bfloat16, {"plain", "long"}),
        (another_dtype, {"plain"}),
        (assumes_contiguous, {"strided"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_attention_kernel_is_caught(wrong: Callable[..., Tensor], cases: set[str]) -> None:
    class Wrong(AttentionKernel):
        id = "wrong"

        def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
            return wrong(q, k, v, mask, scale=scale)

    outcomes = attention.check_attention(Wrong(), BACKEND, DEVICE, FULL, "float32")
    assert cases <= {o.case for o in outcomes if o.status == "fail"}


def test_a_kernel_that_raises_fails_with_the_reason() -> None:
    class Raises(AttentionKernel):
        def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
            raise RuntimeError("no kernel image")

    outcomes = attention.check_attention(Raises(), BACKEND, DEVICE, FULL, "float32", attention.CASES[:1])
    assert failures(outcomes) == ["plain: raised RuntimeError: no kernel image"]


def input_of(x: Tensor, format: str, block: tuple[int, int]) -> Tensor:
    kernel = LinearKernel(format)
    values, scales = quantize_blocks(x.float(), kernel.format, block)
    return values.float() * scales


class WeightScaleDropped(LinearKernel):
    def apply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        return F.linear(x, packed["values"].to(x.dtype), bias)


class WeightScaleOfAnotherRow(LinearKernel):
    def apply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        weight = packed["values"].float() * packed["scales"].roll(1, 0)
        return F.linear(x, weight.to(x.dtype), bias)


class BiasDropped(LinearKernel):
    def apply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        return super().apply(x, packed, None)


class QuantisesItsInput(EmulatedLinear):
    quantizes_input = False  # claims to be exact to the stored weight, and is not


class InputScaleDropped(EmulatedLinear):
    def apply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        values, _ = quantize_blocks(x.float(), self.format, (1, 0))
        weight = decode(Encoded(self.format, packed["values"], packed["scales"]))
        return F.linear(values.float(), weight, bias).to(x.dtype)


class OneInputScaleForAllRows(EmulatedLinear):
    def apply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        weight = decode(Encoded(self.format, packed["values"], packed["scales"]))
        return F.linear(input_of(x, self.format.name, (0, 0)), weight, bias).to(x.dtype)


class BiasBeforeTheScale(EmulatedLinear):
    def apply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        unscaled = F.linear(input_of(x, self.format.name, (1, 0)), packed["values"].float(), bias)
        return (unscaled * packed["scales"].T).to(x.dtype)


@pytest.mark.parametrize(
    ("wrong", "case"),
    [
        (WeightScaleDropped, "plain"),
        (WeightScaleOfAnotherRow, "no_bias"),
        (BiasDropped, "plain"),
        (QuantisesItsInput, "plain"),
        (InputScaleDropped, "no_bias"),
        (OneInputScaleForAllRows, "outlier"),
        (BiasBeforeTheScale, "plain"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_wrong_linear_kernel_is_caught(wrong: type[LinearKernel], case: str) -> None:
    outcomes = linear.check_linear(wrong("int8_row", "wrong"), BACKEND, DEVICE, FULL, "float32")
    assert case in {o.case for o in outcomes if o.status == "fail"}


def rotate_pairs(x: Tensor, weight: Tensor | None, eps: float, rotary: ops.Rotary | None) -> Tensor:
    x = ops.rms_norm(x, weight, eps)
    if rotary is None:
        return x
    n = 2 * rotary.cos.shape[-1]
    cos, sin = rotary.cos[:, :, None], rotary.sin[:, :, None]
    a, b = x[..., 0:n:2], x[..., 1:n:2]
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([turned, x[..., n:]], dim=-1)


def turn_back(x: Tensor, weight: Tensor | None, eps: float, rotary: ops.Rotary | None) -> Tensor:
    back = None if rotary is None else ops.Rotary(rotary.cos, -rotary.sin)
    return ops.head_norm_rotary(x, weight, eps, back)


WRONG_FUSED: list[tuple[str, Callable[..., Tensor]]] = [
    ("rms_norm", lambda x, w, eps: F.layer_norm(x, x.shape[-1:], w, None, eps)),
    ("rms_norm", lambda x, w, eps: F.rms_norm(x, x.shape[-1:], None, eps)),
    (
        "rms_norm",
        lambda x, w, eps: ops.rms_norm(x.bfloat16(), None if w is None else w.bfloat16(), eps).float(),
    ),
    ("norm_modulate", lambda x, w, e, m, c: ops.rms_norm(x, w, e) * m.rows(c + 1) + m.rows(c)),
    ("norm_modulate", lambda x, w, e, m, c: ops.rms_norm(x, w, e) * (1 + m.rows(c)) + m.rows(c + 1)),
    ("norm_modulate", lambda x, w, e, m, c: ops.norm_modulate(x, w, e, m, 0)),
    ("gated_residual", lambda x, b, m, c: x + b),
    ("gated_residual", lambda x, b, m, c: ops.gated_residual(x, b, m, c - 1)),
    ("gated_residual", lambda x, b, m, c: x + m.table[:, c][m.index[:1]] * b),
    ("head_norm_rotary", rotate_pairs),
    ("head_norm_rotary", turn_back),
    ("head_norm_rotary", lambda x, w, e, r: ops.rms_norm(x, w, e)),
    ("swiglu", lambda x: ops.swiglu(x.roll(x.shape[-1] // 2, -1))),
    ("swiglu", lambda x: F.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
]


@pytest.mark.parametrize(("op", "wrong"), WRONG_FUSED)
def test_a_wrong_fused_op_is_caught(op: str, wrong: Callable[..., Tensor]) -> None:
    outcomes = fused.check_fused(FusedOp(op, "wrong", wrong), BACKEND, DEVICE, FULL, "float32")
    assert failures(outcomes)


def test_the_error_measure_sees_one_wrong_row_and_rows_that_must_be_zero() -> None:
    oracle = torch.randn(50, 8, dtype=torch.float64)
    oracle[7] = 0
    got = oracle.clone()
    assert worst_row_error(got, oracle) == 0
    got[7] = 1e-2
    assert worst_row_error(got, oracle) > 1
    got[7] = 0
    got[9] *= 1.1
    assert worst_row_error(got, oracle) == pytest.approx(0.1)
    got[9, 0] = torch.nan
    assert worst_row_error(got, oracle) == float("inf")
    assert worst_row_error(oracle[:4], oracle) == float("inf")


# --- what the cpu refuses, and what it says of itself ---


def test_float16_is_refused_by_every_attention_kernel_with_the_reason() -> None:
    request = AttentionRequest("float16", 128, 4, 4, 544)
    for kernel in BACKEND.attention_kernels()[1:]:
        reject = kernel.check(request, FULL)
        assert reject is not None
        assert "float16" in reject.detail
    assert "float16" not in BACKEND.capabilities(DEVICE).dtypes


def test_bfloat16_is_refused_where_the_processor_has_none() -> None:
    bare = dataclasses.replace(FULL, dtypes=frozenset({"float32"}), native_formats=frozenset())
    request = AttentionRequest("bfloat16", 128, 4, 4, 544)
    rejects = [kernel.check(request, bare) for kernel in BACKEND.attention_kernels()]
    assert [reject.code for reject in rejects if reject] == ["dtype"] * 4
    int8 = BACKEND.linear_kernel("int8_row", "int8_matmul")
    assert int8.check(LinearRequest("int8_row", "float32", 8, 64, 64), FULL) is None
    reject = int8.check(LinearRequest("int8_row", "float32", 8, 64, 64), bare)
    assert reject is not None
    assert reject.code == "instructions"


@pytest.mark.parametrize(
    ("flags", "dtypes", "formats"),
    [
        ("fpu avx2", {"float32"}, set()),
        ("avx512f avx512_bf16", {"float32", "bfloat16"}, set()),
        ("amx_bf16 amx_int8", {"float32", "bfloat16"}, {"int8_row"}),
        ("avx_vnni", {"float32"}, {"int8_row"}),
        ("asimd bf16 i8mm", {"float32", "bfloat16"}, {"int8_row"}),
    ],
)
def test_capabilities_follow_the_processor_flags(
    monkeypatch: pytest.MonkeyPatch, flags: str, dtypes: set[str], formats: set[str]
) -> None:
    monkeypatch.setattr("portable_dit.host.cpu_flags", lambda: frozenset(flags.split()))
    found = BACKEND.capabilities(DEVICE)
    assert found.dtypes == dtypes
    assert found.native_formats == formats


def test_the_device_tells_its_memory_and_has_neither_graphs_nor_pinned_memory() -> None:
    memory = BACKEND.memory(DEVICE)
    assert memory is not None
    free, total = memory
    assert 0 < free <= total == DEVICE.total_bytes
    found: Capabilities = BACKEND.capabilities(DEVICE)
    assert found.host_shares_memory
    assert not found.pinned_memory
    assert not found.graphs.supported
    assert BACKEND.graph(lambda x: x, [torch.zeros(1)]) is None
    assert BACKEND.process_group(DEVICE) == {"backend": "gloo"}
    assert found.collectives.backend == "gloo"


def test_peak_bytes_sees_an_allocation_and_can_be_reset() -> None:
    if BACKEND.peak_bytes(DEVICE, reset=True) is None:
        pytest.skip("this system does not keep the peak")
    before = BACKEND.peak_bytes(DEVICE)
    block = mmap.mmap(-1, 64 << 20)  # pages of its own; an allocator may have freed ones at hand
    torch.frombuffer(block, dtype=torch.uint8).fill_(1)
    after = BACKEND.peak_bytes(DEVICE, reset=True)
    assert before is not None
    assert after is not None
    assert after - before > 48 << 20
    del block
    BACKEND.trim(DEVICE)
    BACKEND.peak_bytes(DEVICE, reset=True)
    again = BACKEND.peak_bytes(DEVICE)
    assert again is not None
    assert again < after - (32 << 20)


def test_kernels_are_found_by_id_and_a_wrong_id_names_the_near_one() -> None:
    assert BACKEND.fused_op("swiglu", "in_place").op == "swiglu"
    with pytest.raises(BackendError, match=r"'sdpa_flsh'.*Did you mean 'sdpa_flash'"):
        BACKEND.attention_kernel("sdpa_flsh")


def test_every_format_ends_with_the_plain_kernel() -> None:
    assert all(kernels[-1].id == "plain" for kernels in LISTS.linear.values())
    assert [k.id for k in LISTS.linear["int8_row"]] == ["int8_matmul", "emulated", "plain"]


def test_only_the_math_kernel_gives_the_log_sum_exp() -> None:
    request = AttentionRequest("float32", 128, 4, 4, 544, return_lse=True)
    takers = [k.id for k in BACKEND.attention_kernels() if k.check(request, FULL) is None]
    assert takers == ["math"]


def test_a_kernel_refuses_what_it_is_not_for() -> None:
    request = LinearRequest("mxfp8", "float32", 8, 64, 64)
    reject = BACKEND.linear_kernel("fp8_row", "plain").check(request, FULL)
    assert reject is not None
    assert reject.detail == "serves fp8_row, not mxfp8"
    emulated = EmulatedLinear("fp8_weight_only").check(
        LinearRequest("fp8_weight_only", "float32", 8, 64, 64), FULL
    )
    assert emulated is not None
    assert emulated.code == "weight_only"
    fused_reject = BACKEND.fused_op("swiglu", "in_place").check(FusionRequest("swiglu", "bfloat16", 64), FULL)
    assert fused_reject is not None
    assert fused_reject.code == "dtype"


def test_the_inline_lane_runs_at_once_and_in_order() -> None:
    lane: Lane = BACKEND.lane(DEVICE)
    target = torch.zeros(3)
    assert lane.run(lambda: 7) == 7
    lane.copy(target, torch.ones(3))
    lane.wait(lane.mark())
    assert target.tolist() == [1, 1, 1]


def test_an_id_less_backend_still_has_devices_by_its_plain_body() -> None:
    class Mine(Backend):
        id = "mine"

    device: Device = Mine().devices()[0]
    assert device.backend == "mine"
    assert device.torch_device == "cpu"
    assert Mine().capabilities(device).dtypes == {"float32"}
