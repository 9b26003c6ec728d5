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


@triton.jit
def _experts_of(index_ptr, choice, R, first, held, BINS: tl.constexpr):
    """The bin of each choice: its expert from `first` on; `held` for one elsewhere, the last bin for none."""
    expert = tl.load(index_ptr + choice, mask=choice < R, other=0).to(tl.int32) - first
    expert = tl.where((expert >= 0) & (expert < held), expert, held)
    return tl.where(choice < R, expert, BINS - 1)


@triton.jit
def count_choices(index_ptr, starts_ptr, R, first, held, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """How many choices of each block fall to each bin: index int64 [R] -> int32 [blocks, BINS]."""
    block = tl.program_id(0)
    expert = _experts_of(index_ptr, block * BLOCK + tl.arange(0, BLOCK), R, first, held, BINS)
    bins = tl.arange(0, BINS)
    hits = (expert[:, None] == bins[None, :]).to(tl.int32)
    tl.store(starts_ptr + block * BINS + bins, tl.sum(hits, axis=0))


@triton.jit
def place_blocks(
    starts_ptr, ends_ptr, blocks, held, BINS: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr
):
    """Counts become where each block's choices of each bin begin; ends int32 [held], where each expert's end.

    One program, ROWS blocks at a time, TURNS times.
    """
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), dtype=tl.int32)
    for turn in range(TURNS):
        row = turn * ROWS + tl.arange(0, ROWS)
        place = starts_ptr + row[:, None] * BINS + bins[None, :]
        total += tl.sum(tl.load(place, mask=(row < blocks)[:, None], other=0), axis=0)
    ends = tl.cumsum(total, axis=0)
    tl.store(ends_ptr + bins, ends, mask=bins < held)
    start = ends - total
    for turn in range(TURNS):
        row = turn * ROWS + tl.arange(0, ROWS)
        place, mask = starts_ptr + row[:, None] * BINS + bins[None, :], (row < blocks)[:, None]
        counts = tl.load(place, mask=mask, other=0)
        tl.store(place, start[None, :] + tl.cumsum(counts, axis=0) - counts, mask=mask)
        start += tl.sum(counts, axis=0)


@triton.jit
def deal_choices(
    index_ptr,
    starts_ptr,
    rows_ptr,
    places_ptr,
    R,
    first,
    held,
    each,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """places int64 [R] of the choices, and rows int64 [R]: whose choice stands at each place.

    each: choices of a row.
    """
    block = tl.program_id(0)
    choice = block * BLOCK + tl.arange(0, BLOCK)
    expert = _experts_of(index_ptr, choice, R, first, held, BINS)
    bins = tl.arange(0, BINS)
    hits = (expert[:, None] == bins[None, :]).to(tl.int32)
    before = tl.cumsum(hits, axis=0) - hits  # of the same bin, in this block
    start = tl.load(starts_ptr + block * BINS + bins)
    place = tl.sum((before + start[None, :]) * hits, axis=1)
    tl.store(places_ptr + choice, place.to(tl.int64), mask=choice < R)
    tl.store(rows_ptr + place, (choice // each).to(tl.int64), mask=choice < R)
