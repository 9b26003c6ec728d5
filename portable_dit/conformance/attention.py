"""Attention cases and their oracle. A kernel is judged only on the cases that its check accepts.

Letters: B batch, S tokens, N heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from portable_dit import ops
from portable_dit.backend import AttentionKernel, Backend
from portable_dit.capabilities import AttentionRequest, Capabilities, Device
from portable_dit.conformance.outcome import REPEATS, Outcome, judge, worst_row_error
from portable_dit.masks import NO_MASK, Causal, CausalWithFullSpans, KeyPadding, Mask, Segments
from portable_dit.plugins import attempt


@dataclass(frozen=True)
class AttentionCase:
    """One call. rows: (Sq, Sk). padding: kept keys of each batch entry. spans, segments: as in masks.py.

    magnitude multiplies queries and keys: large scores must not overflow. strided: q, k, v are slices of one
    packed tensor, as a fused projection gives them. scale None is D^-0.5.
    """

    name: str
    mask: str = "none"
    batch: int = 1
    rows: tuple[int, int] = (96, 96)
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 128
    scale: float | None = None
    magnitude: float = 1.0
    strided: bool = False
    padding: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    segments: tuple[int, ...] = ()

    @property
    def real_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


CASES: tuple[AttentionCase, ...] = (
    AttentionCase("plain"),
    *(AttentionCase(f"head_dim_{dim}", rows=(65, 65), head_dim=dim) for dim in (64, 72, 96, 256)),
    AttentionCase("long", rows=(544, 544)),
    AttentionCase("odd_rows", rows=(131, 131)),
    AttentionCase("many_keys", rows=(16, 33000), heads=1, kv_heads=1, head_dim=64),
    AttentionCase("one_query", rows=(1, 77)),
    AttentionCase("one_key", rows=(33, 1)),
    AttentionCase("fewer_queries", rows=(48, 160)),
    AttentionCase("shared_key_heads", rows=(64, 64), heads=8, kv_heads=2),
    AttentionCase("own_scale", rows=(64, 64), scale=0.5),
    AttentionCase("large_scores", rows=(64, 64), magnitude=6.0),
    AttentionCase("strided", rows=(80, 80), batch=2, strided=True),
    AttentionCase("key_padding", "key_padding", batch=2, rows=(64, 64), padding=(64, 23)),
    AttentionCase("key_padding_one_key", "key_padding", batch=2, rows=(40, 40), padding=(1, 40)),
    AttentionCase("key_padding_fewer_queries", "key_padding", batch=2, rows=(24, 40), padding=(17, 40)),
    AttentionCase("nothing_to_see", "key_padding", batch=2, rows=(40, 40), padding=(0, 40)),
    AttentionCase("causal", "causal", rows=(97, 97)),
    AttentionCase("causal_fewer_queries", "causal", rows=(5, 64)),
    AttentionCase("causal_more_queries", "causal", rows=(64, 40)),
    AttentionCase("full_spans", "causal_with_full_spans", rows=(90, 90), spans=((10, 40), (60, 75))),
    AttentionCase("segments", "segments", rows=(100, 100), segments=(37, 1, 62)),
)

LSE_CASE = AttentionCase("joined_halves", rows=(60, 90), head_dim=64)
HALF = 37  # keys of the first of two halves
KEPT = 4 * len(CASES)  # inputs and results, for the next kernel: each dtype, and one way of rounding


def check_attention(
    kernel: AttentionKernel,
    backend: Backend,
    device: Device,
    capabilities: Capabilities,
    dtype: str,
    cases: Sequence[AttentionCase] = CASES,
    repeats: int = REPEATS,
) -> list[Outcome]:
    """One outcome per case. repeats: runs, the best of which is the time."""
    return [_check(kernel, backend, device, capabilities, dtype, case, repeats) for case in cases]


def check_log_sum_exp(
    kernel: AttentionKernel, device: Device, capabilities: Capabilities, dtype: str
) -> list[Outcome]:
    """Two halves of the keys, joined by their log-sum-exps as a ring joins them, are the whole."""
    case = LSE_CASE
    torch_dtype: torch.dtype = getattr(torch, dtype)
    request = AttentionRequest(
        dtype, case.head_dim, case.heads, case.kv_heads, max(case.rows), return_lse=True
    )
    reject = kernel.check(request, capabilities)
    if reject is not None:
        return [Outcome("attention", kernel.id, case.name, dtype, "not_claimed", reject.detail)]
    q, k, v = (t.to(device.torch_device) for t in inputs(case, torch_dtype))

    def joined() -> Tensor:
        halves = [
            kernel.run_with_lse(q, k[:, part], v[:, part], NO_MASK, scale=case.real_scale)
            for part in (slice(HALF), slice(HALF, None))
        ]
        weights = torch.stack([lse.float() for _, lse in halves]).softmax(dim=0)  # [2, B, N, Sq]
        parts = [
            out.float() * w.transpose(1, 2)[..., None] for (out, _), w in zip(halves, weights, strict=True)
        ]
        whole: Tensor = parts[0] + parts[1]
        return whole.to(torch_dtype)  # [B, Sq, N, D]

    wanted = oracle(case, torch_dtype)
    got, raised = attempt(joined)
    if got is None:
        return [Outcome("attention", kernel.id, case.name, dtype, "fail", f"raised {raised}")]
    # Twice again, since each half was rounded before they were joined.
    bound = max(
        4 * worst_row_error(plain_result(case, torch_dtype), wanted), 2 * torch.finfo(torch_dtype).eps
    )
    error = worst_row_error(got, wanted)
    kept = error <= bound
    detail = "" if kept else f"error {error:.2e} above {bound:.2e}"
    status: Literal["pass", "fail"] = "pass" if kept else "fail"
    return [Outcome("attention", kernel.id, case.name, dtype, status, detail, error, bound)]


def _check(
    kernel: AttentionKernel,
    backend: Backend,
    device: Device,
    capabilities: Capabilities,
    dtype: str,
    case: AttentionCase,
    repeats: int,
) -> Outcome:
    request = AttentionRequest(dtype, case.head_dim, case.heads, case.kv_heads, max(case.rows), case.mask)
    reject = kernel.check(request, capabilities)
    if reject is not None:
        return Outcome("attention", kernel.id, case.name, dtype, "not_claimed", reject.detail)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    q, k, v = (t.to(device.torch_device) for t in inputs(case, torch_dtype))
    mask, scale = build_mask(case, torch.device(device.torch_device)), case.real_scale
    return judge(
        lambda: kernel.run(q, k, v, mask, scale=scale),
        lambda: ops.attention(q, k, v, mask, scale=scale),
        oracle(case, torch_dtype),
        plain_on_host=lambda: plain_result(case, torch_dtype, kernel.rounds_to),
        op="attention",
        kernel=kernel.id,
        case=case.name,
        dtype=dtype,
        backend=backend,
        device=device,
        repeats=repeats,
    )


@lru_cache(maxsize=KEPT)
def plain_result(case: AttentionCase, dtype: torch.dtype, rounds_to: str | None = None) -> Tensor:
    """What the plain body gives on the host, from inputs rounded as `AttentionKernel.rounds_to` says."""
    mask = build_mask(case, torch.device("cpu"))
    q, k, v = inputs(case, dtype)
    if rounds_to is not None:
        q, k = (_rounded(x, case.kv_heads, rounds_to) for x in (q, k))
        v = v if rounds_to == "int8" else _rounded(v, case.kv_heads, rounds_to)
    return ops.attention(q, k, v, mask, scale=case.real_scale)


def _rounded(x: Tensor, groups: int, to: str) -> Tensor:
    """x [B, S, N, D] as 8-bit numbers would keep it, with a scale for each batch entry and group of heads."""
    dtype: torch.dtype = getattr(torch, to)
    whole = not dtype.is_floating_point
    parts = x.float().reshape(*x.shape[:2], groups, -1, x.shape[3])  # [B, S, groups, N / groups, D]
    largest = torch.iinfo(dtype).max if whole else torch.finfo(dtype).max
    amax = parts.abs().amax(dim=(1, 3, 4), keepdim=True)
    scale = (amax / largest).clamp_min(torch.finfo(torch.float32).tiny)
    steps = (parts / scale).round() if whole else parts / scale
    return (steps.to(dtype).float() * scale).view(x.shape).to(x.dtype)


@lru_cache(maxsize=KEPT)
def inputs(case: AttentionCase, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, Sq, N, D], k and v [B, Sk, Nkv, D] on the host, the same on every machine."""
    generator = torch.Generator().manual_seed(1)
    rows_q, rows_k = case.rows

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if case.strided:
        packed = draw(case.batch, rows_q, 3, case.heads, case.head_dim).to(dtype)
        q, k, v = packed.unbind(dim=2)
        return q, k, v
    q = draw(case.batch, rows_q, case.heads, case.head_dim) * case.magnitude
    k = draw(case.batch, rows_k, case.kv_heads, case.head_dim) * case.magnitude
    v = draw(case.batch, rows_k, case.kv_heads, case.head_dim)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def build_mask(case: AttentionCase, device: torch.device) -> Mask:
    """The case's mask as the data that models hand to kernels."""
    rows_k = case.rows[1]
    match case.mask:
        case "key_padding":
            kept = torch.tensor(case.padding)[:, None]
            return KeyPadding((torch.arange(rows_k)[None, :] < kept).to(device))
        case "causal":
            return Causal()
        case "causal_with_full_spans":
            return CausalWithFullSpans(case.spans)
        case "segments":
            offsets = torch.tensor([sum(case.segments[:end]) for end in range(len(case.segments) + 1)])
            return Segments(case.segments, offsets.to(device, torch.int32))
    return NO_MASK


@lru_cache(maxsize=KEPT)
def oracle(case: AttentionCase, dtype: torch.dtype) -> Tensor:
    """float64 attention on the host, [B, Sq, N, D]; spells the masks out again, without masks.py."""
    q, k, v = (t.double() for t in inputs(case, dtype))
    share, scale = case.heads // case.kv_heads, case.real_scale
    seen = seen_keys(case)
    out = torch.zeros_like(q)
    for head in range(case.heads):
        scores = q[:, :, head] @ k[:, :, head // share].transpose(1, 2) * scale  # [B, Sq, Sk]
        scores = torch.where(seen, scores, -torch.inf)
        peak = scores.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).min)
        weights = (scores - peak).exp()
        total = weights.sum(dim=-1, keepdim=True)
        out[:, :, head] = torch.where(total > 0, weights / total, 0.0) @ v[:, :, head // share]
    return out


@lru_cache(maxsize=64)
def seen_keys(case: AttentionCase) -> Tensor:
    """bool [B, Sq, Sk], True where the query sees the key; [1, 1, 1] when all do."""
    if case.mask == "none":
        return torch.ones(1, 1, 1, dtype=torch.bool)
    rows_q, rows_k = case.rows
    return torch.tensor(
        [[[_sees(case, b, i, j) for j in range(rows_k)] for i in range(rows_q)] for b in range(case.batch)]
    )


def _sees(case: AttentionCase, batch: int, row: int, key: int) -> bool:
    at = row + case.rows[1] - case.rows[0]  # the key that stands where the query stands
    match case.mask:
        case "key_padding":
            return key < case.padding[batch]
        case "causal":
            return key <= at
        case "causal_with_full_spans":
            return key <= at or any(a <= at < b and a <= key < b for a, b in case.spans)
        case "segments":
            ends = [sum(case.segments[: n + 1]) for n in range(len(case.segments))]
            return [at < e for e in ends].index(True) == [key < e for e in ends].index(True)
    return True
