"""The Triton kernels behind fusions.py that go by attention heads.

Letters: B batch, S tokens, N heads, D head_dim.
"""

# mypy: ignore-errors
# ruff: noqa: N803, RUF005

import triton
import triton.language as tl

from portable_dit_cuda.triton_kernels import _quotient, _row_scale


@triton.jit
def _rows_of_a_head(
    x_ptr, S, D, batch_stride, row_stride, head_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """This program's x [ROWS, BLOCK] float32 of one head and batch entry, and where: row, channel, mask."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    d = tl.arange(0, BLOCK)[None, :]
    mask = (rows < S) & (d < D)
    base = x_ptr + tl.program_id(2).to(tl.int64) * batch_stride + tl.program_id(1) * head_stride
    return tl.load(base + rows * row_stride + d, mask=mask, other=0.0).to(tl.float32), rows, d, mask


@triton.jit
def largest_of_heads(
    x_ptr,
    largest_ptr,
    S,
    D,
    heads,
    batch_stride,
    row_stride,
    head_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest magnitude of x [B, S, N, D] in each group of GROUP heads: [B, heads], zeros before."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    x, _, _, _ = _rows_of_a_head(x_ptr, S, D, batch_stride, row_stride, head_stride, ROWS, BLOCK)
    largest = tl.max(tl.max(tl.abs(x), axis=1), axis=0)
    tl.atomic_max(largest_ptr + batch * heads + head // GROUP, largest)


@triton.jit
def quantize_heads(
    x_ptr,
    largest_ptr,
    values_ptr,
    scales_ptr,
    S,
    N,
    D,
    heads,
    batch_stride,
    row_stride,
    head_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x [B, S, N, D] -> e4m3 values [B, S, N, D] and scales [B, heads], by `largest_of_heads`."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    x, rows, d, mask = _rows_of_a_head(x_ptr, S, D, batch_stride, row_stride, head_stride, ROWS, BLOCK)
    group = batch * heads + head // GROUP
    scale = _row_scale(tl.load(largest_ptr + group), 448.0)
    values = _quotient(x, scale, tl.math.div_rn(1.0, scale))
    tl.store(
        values_ptr + ((batch * S + rows) * N + head) * D + d,
        values.to(values_ptr.dtype.element_ty),
        mask=mask,
    )
    tl.store(scales_ptr + group, scale)


@triton.jit
def head_norm_rotary(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    S,
    N,
    D,
    pairs,
    x_batch_stride,
    x_row_stride,
    x_head_stride,
    angle_batch_stride,
    eps,
    HAS_WEIGHT: tl.constexpr,
    ROTATE: tl.constexpr,
    TURNS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Per-head RMS norm and rotate-half of x [B, S, N, D]; a program takes HEADS heads of a row TURNS times.

    Channel d < pairs turns with d + pairs. GROUP divides pairs, so partners lie side by side as the channels
    of a group do; they are read from memory again, which the cache answers. What weight and angles do to a
    channel and to its partner is the same for every head, and is worked out once.
    """
    token = tl.program_id(0).to(tl.int64)
    batch, row = token // S, token % S
    head = tl.arange(0, HEADS)[:, None, None]
    group = tl.arange(0, GROUPS)[None, :, None] + head * 0  # all of one shape, so that no thread waits
    inside = tl.arange(0, GROUP)[None, None, :]
    d = group * GROUP + inside
    own = tl.zeros((HEADS, GROUPS, GROUP), dtype=tl.float32) + 1.0
    if HAS_WEIGHT:
        own = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    if ROTATE:
        half = pairs // GROUP
        is_first = group < half
        turns = (group < 2 * half) & (inside >= 0)
        partner = tl.where(turns, tl.where(is_first, group + half, group - half), group) * GROUP + inside
        angle = batch * angle_batch_stride + row * pairs
        angle += tl.where(is_first, group, group - half) * GROUP + inside
        own *= tl.load(cos_ptr + angle, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=turns, other=0.0).to(tl.float32)
        others = tl.where(is_first, -sin, sin)
        if HAS_WEIGHT:
            others *= tl.load(weight_ptr + partner, mask=d < D, other=0.0).to(tl.float32)
    base = x_ptr + batch * x_batch_stride + row * x_row_stride
    x, partners = (), ()
    for turn in tl.static_range(TURNS):
        heads = (tl.program_id(1) * TURNS + turn) * HEADS + head
        mask = (heads < N) & (d < D)
        x = x + (tl.load(base + heads * x_head_stride + d, mask=mask, other=0.0),)
        if ROTATE:
            partners = partners + (tl.load(base + heads * x_head_stride + partner, mask=mask, other=0.0),)
    y = ()
    for turn in tl.static_range(TURNS):
        part = x[turn].to(tl.float32)
        square = tl.sum(tl.sum(part * part, axis=2), axis=1) / D
        part *= own
        if ROTATE:
            part += partners[turn].to(tl.float32) * others
        y = y + ((part * (1.0 / tl.sqrt(square + eps))[:, None, None]).to(out_ptr.dtype.element_ty),)
    for turn in tl.static_range(TURNS):
        heads = (tl.program_id(1) * TURNS + turn) * HEADS + head
        tl.store(out_ptr + (token * N + heads) * D + d, y[turn], mask=(heads < N) & (d < D))
