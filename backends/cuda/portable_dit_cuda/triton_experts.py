"""The Triton kernels behind experts.py: a mixture's grouped product, and the seams beside it.

Letters: B batch, S tokens, N heads or out features, D head_dim, R rows ordered by expert, E experts, K in
features, M rows, C channels.
"""

# mypy: ignore-errors
# ruff: noqa: N803, RUF005

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
    TURNS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """x [B, S, N, D] turned by float32 angles [B or 1, S, D / 2], then normed by head; -> contiguous.

    Turning leaves the sum of squares as it is, so both need one read. A program takes HEADS heads of a row
    TURNS times, and reads all before it writes.
    """
    token = tl.program_id(0).to(tl.int64)
    batch, row = token // S, token % S
    head = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, HALF)[None, :] + head * 0  # all of one shape, so that no thread waits
    pairs = D // 2
    inside = d < pairs
    angle = batch * angle_batch_stride + row * pairs + d
    cos = tl.load(cos_ptr + angle, mask=inside, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    by_first = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    by_second = tl.load(weight_ptr + pairs + d, mask=inside, other=0.0).to(tl.float32)
    base = x_ptr + batch * x_batch_stride + row * x_row_stride
    first, second = (), ()
    for turn in tl.static_range(TURNS):
        heads = (tl.program_id(1) * TURNS + turn) * HEADS + head
        place, mask = base + heads * x_head_stride + d, (heads < N) & inside
        first = first + (tl.load(place, mask=mask, other=0.0),)
        second = second + (tl.load(place + pairs, mask=mask, other=0.0),)
    for turn in tl.static_range(TURNS):
        heads = (tl.program_id(1) * TURNS + turn) * HEADS + head
        x, y = first[turn].to(tl.float32), second[turn].to(tl.float32)
        factor = 1.0 / tl.sqrt(tl.sum(x * x + y * y, axis=1) / D + eps)[:, None]
        place, mask = out_ptr + (token * N + heads) * D + d, (heads < N) & inside
        turned = (x * cos - y * sin) * factor * by_first
        tl.store(place, turned.to(out_ptr.dtype.element_ty), mask=mask)
        turned = (y * cos + x * sin) * factor * by_second
        tl.store(place + pairs, turned.to(out_ptr.dtype.element_ty), mask=mask)


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
