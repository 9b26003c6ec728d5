"""Cases of the fused seams of ops.py, each with a float64 oracle written from its formula.

Letters: B batch, S tokens, C channels, N heads, D head_dim, R rows of a modulation table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from portable_dit import ops
from portable_dit.backend import Backend, FusedOp
from portable_dit.capabilities import Capabilities, Device, FusionRequest
from portable_dit.conformance.outcome import REPEATS, Outcome, Promises, judge
from portable_dit.formats import QuantizedRows, format_named, quantize_blocks
from portable_dit.ops import Modulation, Rotary

EPS = 1e-6


@dataclass(frozen=True)
class FusedCase:
    """One call. pairs: rotated channel pairs, 0 for no rotary. weight: whether the norm has one.

    chunk: where the modulation table is read.
    """

    name: str
    batch: int = 1
    rows: int = 96
    channels: int = 384
    head_dim: int = 128
    pairs: int = 48
    weight: bool = True
    chunk: int = 0


CASES: tuple[FusedCase, ...] = (
    FusedCase("plain"),
    FusedCase("many_rows", rows=544, chunk=3),
    FusedCase("one_row", rows=1),
    FusedCase("batch", batch=2, rows=33, chunk=3),
    FusedCase("odd_channels", rows=17, channels=100, head_dim=72, pairs=20),
    FusedCase("all_channels_turn", rows=31, head_dim=64, pairs=32),
    FusedCase("no_rotary", rows=31, pairs=0),
    FusedCase("no_weight", rows=31, weight=False),
)

Arguments = tuple[Any, ...]


def check_fused(
    op: FusedOp,
    backend: Backend,
    device: Device,
    capabilities: Capabilities,
    dtype: str,
    cases: Sequence[FusedCase] = CASES,
    repeats: int = REPEATS,
) -> list[Outcome]:
    """One outcome per case that makes sense for the seam; none for a seam that has no oracle here."""
    seam = SEAMS.get(op.op)
    if seam is None:
        return []
    fitting = [case for case in cases if case.weight or op.op in OPTIONAL_WEIGHT]
    return [_check(op, seam, backend, device, capabilities, dtype, case, repeats) for case in fitting]


def check_producers(
    op: FusedOp, backend: Backend, device: Device, capabilities: Capabilities, dtype: str
) -> list[Outcome]:
    """A seam that makes its reader's input quantised makes, bit for bit, what the reader would make of it."""
    seam = SEAMS.get(op.op)
    told = Promises(op.op, op.id)
    for format, function in op.quantized.items() if seam is not None else ():
        request = FusionRequest(op.op, dtype, CASES[0].channels)
        if seam is None or op.check(request, capabilities) is not None:
            continue
        for case in CASES:
            if case.name in ("plain", "many_rows", "batch"):
                trouble = partial(_producer_trouble, op, seam, function, format, device, dtype, case)
                told.check(f"{format}_{case.name}", trouble, dtype=dtype)
    return told.outcomes


def _producer_trouble(
    op: FusedOp,
    seam: Seam,
    function: Callable[..., QuantizedRows],
    format: str,
    device: Device,
    dtype: str,
    case: FusedCase,
) -> str | None:
    form = format_named(format)
    assert form.activations is not None
    arguments = tuple(_move(_cast(a, getattr(torch, dtype)), device.torch_device) for a in seam.inputs(case))
    made, result = function(*arguments), op.run(*arguments)
    if made.format != form or made.shape != tuple(result.shape) or made.dtype != result.dtype:
        return f"says it is {made.format.name} {list(made.shape)} of {made.dtype}"
    rows = result.reshape(-1, result.shape[-1]).float().cpu()
    values, scales = quantize_blocks(rows, form, form.activations)
    pairs = (("values", made.values, values), ("scales", made.scales, scales))
    for what, got, wanted in pairs:
        bytes_got, bytes_wanted = (t.contiguous().cpu().view(torch.uint8) for t in (got, wanted))
        if bytes_got.numel() != bytes_wanted.numel() or not bool(
            (bytes_got.view(-1) == bytes_wanted.view(-1)).all()
        ):
            return f"its {what} are not those that the reader would make"
    return None


def _check(
    op: FusedOp,
    seam: Seam,
    backend: Backend,
    device: Device,
    capabilities: Capabilities,
    dtype: str,
    case: FusedCase,
    repeats: int,
) -> Outcome:
    reject = op.check(FusionRequest(op.op, dtype, case.channels), capabilities)
    if reject is not None:
        return Outcome(op.op, op.id, case.name, dtype, "not_claimed", reject.detail)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    arguments = tuple(_cast(a, torch_dtype) for a in seam.inputs(case))
    oracle = seam.oracle(*(_cast(a, torch.float64) for a in arguments))
    here = tuple(_move(a, device.torch_device) for a in arguments)
    return judge(
        lambda: op.run(*here),
        lambda: seam.plain(*here),
        oracle,
        plain_on_host=lambda: seam.plain(*arguments),
        op=op.op,
        kernel=op.id,
        case=case.name,
        dtype=dtype,
        backend=backend,
        device=device,
        repeats=repeats,
    )


@dataclass(frozen=True)
class Seam:
    """How to check one seam: float32 inputs on the host, the plain body, and the formula in float64."""

    inputs: Callable[[FusedCase], Arguments]
    plain: Callable[..., Tensor]
    oracle: Callable[..., Tensor]


def _draw(case: FusedCase, *shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def _weight(case: FusedCase, size: int) -> Tensor | None:
    return _draw(case, size, seed=4) if case.weight else None


def _modulation(case: FusedCase) -> Modulation:
    index = torch.randint(0, 5, (case.batch, case.rows), generator=torch.Generator().manual_seed(5))
    return Modulation(_draw(case, 5, 6, case.channels, seed=6), index)


def _norm_oracle(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    size = (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return x / size if weight is None else x / size * weight


def _norm_modulate_oracle(
    x: Tensor, weight: Tensor, eps: float, modulation: Modulation, chunk: int
) -> Tensor:
    normed = _norm_oracle(x, weight, eps)
    out = torch.empty_like(x)
    for b, s in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(x.shape[1])).tolist():
        shift, scale = modulation.table[modulation.index[b, s]][chunk : chunk + 2]
        out[b, s] = normed[b, s] * (1 + scale) + shift
    return out


def _gated_oracle(x: Tensor, branch: Tensor, modulation: Modulation, chunk: int) -> Tensor:
    flat = modulation.index.flatten().tolist()
    gates = torch.stack([modulation.table[entry][chunk] for entry in flat]).view_as(x)
    return x + gates * branch


def _rotary_oracle(x: Tensor, weight: Tensor | None, eps: float, rotary: Rotary | None) -> Tensor:
    x = _norm_oracle(x, weight, eps)
    if rotary is None:
        return x
    pairs = rotary.cos.shape[-1]
    turn = torch.complex(rotary.cos, rotary.sin)[:, :, None]  # [B, S, 1, pairs]
    turned = torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs]) * turn
    return torch.cat([turned.real, turned.imag, x[..., 2 * pairs :]], dim=-1)


def _swiglu_oracle(x: Tensor) -> Tensor:
    gate, value = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return gate / (1 + (-gate).exp()) * value


def _heads(case: FusedCase) -> Arguments:
    angle = _draw(case, 1, case.rows, case.pairs, seed=7)
    rotary = Rotary(angle.cos(), angle.sin()) if case.pairs else None
    x = _draw(case, case.batch, case.rows, 4, case.head_dim)
    return x, _weight(case, case.head_dim), EPS, rotary


def _turned_heads(case: FusedCase) -> Arguments:
    angle = _draw(case, 1, case.rows, case.head_dim // 2, seed=7)
    x = _draw(case, case.batch, case.rows, 4, case.head_dim)
    return x, _draw(case, case.head_dim, seed=4), EPS, Rotary(angle.cos(), angle.sin())


def _turned_oracle(x: Tensor, weight: Tensor, eps: float, rotary: Rotary) -> Tensor:
    turn = torch.complex(rotary.cos, rotary.sin)[:, :, None]  # [B, S, 1, D / 2]
    turned = torch.complex(*x.chunk(2, dim=-1)) * turn
    return _norm_oracle(torch.cat([turned.real, turned.imag], dim=-1), weight, eps)


@dataclass(frozen=True)
class _Wide:
    """A tensor that stays in float32 beside others of the seam's dtype."""

    tensor: Tensor


def _norm_cast_oracle(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return _norm_oracle(x, weight, eps)


def _scaled_oracle(x: Tensor, branch: Tensor, scale: Tensor) -> Tensor:
    return x + branch * scale.expand_as(x)


def _clip(case: FusedCase) -> Arguments:
    # With a mean that a sum of squares would lose.
    x = _draw(case, case.batch, 2, case.channels, case.rows, 5) + 3.0
    return x, _draw(case, case.channels, seed=4), _draw(case, case.channels, seed=8), 4, EPS, case.chunk == 0


def _clip_oracle(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, activate: bool) -> Tensor:
    out = torch.empty_like(x)
    for channels in torch.arange(x.shape[2]).chunk(groups):
        for b in range(x.shape[0]):
            part = x[b][:, channels]
            scaled = (part - part.mean()) / (part.square().mean() - part.mean() ** 2 + eps).sqrt()
            out[b][:, channels] = scaled * weight[channels, None, None] + bias[channels, None, None]
    return out / (1 + (-out).exp()) if activate else out


def _rows(case: FusedCase, width: int = 1, seed: int = 3) -> Tensor:
    return _draw(case, case.batch, case.rows, width * case.channels, seed=seed)


SEAMS: Mapping[str, Seam] = {
    "rms_norm": Seam(lambda c: (_rows(c), _weight(c, c.channels), EPS), ops.rms_norm, _norm_oracle),
    "norm_modulate": Seam(
        lambda c: (_rows(c), _weight(c, c.channels), EPS, _modulation(c), c.chunk),
        ops.norm_modulate,
        _norm_modulate_oracle,
    ),
    "gated_residual": Seam(
        lambda c: (_rows(c), _rows(c, seed=8), _modulation(c), c.chunk + 2), ops.gated_residual, _gated_oracle
    ),
    "norm_cast": Seam(
        lambda c: (_Wide(_rows(c)), _Wide(_draw(c, c.channels, seed=4)), EPS, torch.float32),
        ops.norm_cast,
        _norm_cast_oracle,
    ),
    "scaled_residual": Seam(
        lambda c: (_Wide(_rows(c)), _rows(c, seed=8), _Wide(_draw(c, c.channels, seed=4))),
        ops.scaled_residual,
        _scaled_oracle,
    ),
    "frame_norm": Seam(_clip, ops.frame_norm, _clip_oracle),
    "head_norm_rotary": Seam(_heads, ops.head_norm_rotary, _rotary_oracle),
    "rotary_head_norm": Seam(_turned_heads, ops.rotary_head_norm, _turned_oracle),
    "swiglu": Seam(lambda c: (_rows(c, 2),), ops.swiglu, _swiglu_oracle),
}
OPTIONAL_WEIGHT = ("rms_norm", "head_norm_rotary")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    match value:
        case Tensor():
            return value.to(dtype)
        case _Wide():
            return value.tensor
        case torch.dtype():
            return dtype
        case Modulation():
            return replace(value, table=value.table.to(dtype))
        case Rotary():
            return Rotary(value.cos.to(dtype), value.sin.to(dtype))
    return value


def _move(value: Any, device: str) -> Any:
    match value:
        case Tensor():
            return value.to(device)
        case Modulation():
            return Modulation(value.table.to(device), value.index.to(device))
        case Rotary():
            return Rotary(value.cos.to(device), value.sin.to(device))
    return value
