"""The Triton kernels behind experts.py: a mixture's grouped product, and the seams beside it.

Letters: B batch, S tokens, N heads or out features, D head_dim, R rows ordered by expert, E experts, K in
features, M rows, C channels.
"""

# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl


@triton.jit
def rotary_head_norm(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    S,
    N,
    D,
    x_batch_stride,
    x_row_stride,
    x_head_stride,
    angle_batch_stride,
    eps,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x [B, S, N, D] turned by float32 angles [B or 1, S, D / 2], then normed by head; -> contiguous.

    Turning leaves the sum of squares as it is, so both need one read.
    """
    token = tl.program_id(0).to(tl.int64)
    batch, row = token // S, token % S
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    mask = (heads < N) & (d < D)
    pairs = D // 2
    base = x_ptr + batch * x_batch_stride + row * x_row_stride + heads * x_head_stride
    y = tl.load(base + d, mask=mask, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(y * y, axis=1) / D + eps)[:, None]
    partner = tl.where(d < pairs, d + pairs, d - pairs)
    other = tl.load(base + partner, mask=mask, other=0.0).to(tl.float32)
    angle = batch * angle_batch_stride + row * pairs + tl.where(d < pairs, d, d - pairs)
    cos = tl.load(cos_ptr + angle, mask=d < D, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=d < D, other=0.0).to(tl.float32)
    y = y * cos + tl.where(d < pairs, -1.0, 1.0) * other * sin
    y = y * factor * tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + (token * N + heads) * D + d, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def grouped_product(
    rows,
    weights,
    row_scales_ptr,
    column_scales_ptr,
    ends_ptr,
    expert_ptr,
    first_ptr,
    count_ptr,
    out_ptr,
    N,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Rows [R, K] ordered by expert times the weight [N, K] of each one's expert, scaled: [R, N].

    rows, weights: descriptors of tiles of [R, K] and of [E * N, K]. ends_ptr: where each expert's rows end.
    expert_ptr, first_ptr: of each tile of rows, its expert and its first row; count_ptr: how many there are.
    A tile may reach into the next expert's rows; those are not stored. Programs take tiles in turn, BAND of
    them down at a time across all columns, so that a weight is read from memory once.
    """
    across = tl.cdiv(N, COLUMNS)
    count = tl.load(count_ptr)
    for tile in tl.range(tl.program_id(0), count * across, PROGRAMS, flatten=True):
        band = tile // (BAND * across)
        within = tile % (BAND * across)
        high = tl.minimum(count - band * BAND, BAND)
        place = band * BAND + within % high
        column = within // high * COLUMNS
        expert = tl.load(expert_ptr + place)
        first = tl.load(first_ptr + place)
        end = tl.load(ends_ptr + expert)
        sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(0, K, DEPTH):
            left = rows.load([first, k])
            right = weights.load([expert * N + column, k])
            sums = tl.dot(left, right.T, sums)
        r = first + tl.arange(0, ROWS)
        c = column + tl.arange(0, COLUMNS)
        by_row = tl.load(row_scales_ptr + r, mask=r < end, other=0.0)
        by_column = tl.load(column_scales_ptr + expert * N + c, mask=c < N, other=0.0)
        y = sums * by_row[:, None] * by_column[None, :]
        tl.store(
            out_ptr + r[:, None].to(tl.int64) * N + c[None, :],
            y.to(out_ptr.dtype.element_ty),
            mask=(r < end)[:, None] & (c < N)[None, :],
        )


@triton.jit
def combine_rows(
    x_ptr, places_ptr, shares_ptr, out_ptr, C, x_stride, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    """out [M, C]: the sum of CHOICES rows of x each, at places [M, CHOICES], by float32 shares."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < C
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        place = tl.load(places_ptr + row * CHOICES + choice)
        share = tl.load(shares_ptr + row * CHOICES + choice)
        total += share * tl.load(x_ptr + place * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * C + columns, total.to(out_ptr.dtype.element_ty), mask=mask)
