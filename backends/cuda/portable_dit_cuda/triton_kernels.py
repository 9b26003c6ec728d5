"""The Triton kernels behind fusions.py and linear.py. Imported only where Triton is.

Each row kernel holds a row in registers, reads it once and writes it once. Arithmetic is float32, rounded to
the activation type once; a kernel that also quantises does so from the rounded number, so that it gives
bit for bit what the two steps give one after the other.

Letters: M rows, C channels, N heads, D head_dim.
"""

# mypy: ignore-errors
# ruff: noqa: N803
# Triton's names: a capital BLOCK is a compile-time number, and a kernel's arguments have no types.

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves no fraction, so the sum rounds half to even
TINY = tl.constexpr(1.1754943508222875e-38)
E8M0_LEAST = tl.constexpr(5.877471754111438e-39)  # 2^-127, which is exponent byte 0


@triton.jit
def _row_scale(amax, largest):
    """The scale that brings a row's maximum to the largest value; 1 for a row of zeros."""
    scale = tl.maximum(tl.math.div_rn(amax, largest), TINY)
    return tl.where(amax > 0, scale, 1.0)


@triton.jit
def _store_quantized(values_ptr, scales_ptr, row, columns, mask, y, largest, IS_INT8: tl.constexpr, C):
    """One row y float32 as values and one scale. No clamp: see portable_dit.formats.quantize_blocks."""
    amax = tl.max(tl.where(mask, tl.abs(y), 0.0), axis=0)
    scale = _row_scale(amax, largest)
    scaled = tl.math.div_rn(y, tl.zeros_like(y) + scale)
    if IS_INT8:
        scaled = (scaled + ROUND) - ROUND
    tl.store(values_ptr + row * C + columns, scaled.to(values_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + row, scale)


@triton.jit
def quantize_rows(
    x_ptr, values_ptr, scales_ptr, C, x_stride, largest, IS_INT8: tl.constexpr, BLOCK: tl.constexpr
):
    """x [M, C] -> values [M, C] and scales [M]; one program a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < C
    y = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    _store_quantized(values_ptr, scales_ptr, row, columns, mask, y, largest, IS_INT8, C)


@triton.jit
def norm_modulate(
    x_ptr,
    weight_ptr,
    table_ptr,
    index_ptr,
    out_ptr,
    scales_ptr,
    C,
    x_stride,
    entry_stride,
    chunk_stride,
    eps,
    largest,
    HAS_WEIGHT: tl.constexpr,
    MODULATE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    IS_INT8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RMS norm of x [M, C], then weight, then 1 + scale and shift from the row's table entry.

    table_ptr points at the shift; the scale is one chunk further. One program a row.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < C
    # Read twice, the second time from the cache. How threads share out a row, and so the order of its sum,
    # follows from the widest type that is read or written in that shape; in a shape of its own it is the same
    # whatever is written.
    eights = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    x = tl.load(x_ptr + row * x_stride + eights, mask=eights < C, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(x * x, axis=1), axis=0) / C
    y = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    y = y * (1.0 / tl.sqrt(mean + eps))
    if HAS_WEIGHT:
        y = y * tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if MODULATE:
        entry = table_ptr + tl.load(index_ptr + row) * entry_stride
        shift = tl.load(entry + columns, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(entry + chunk_stride + columns, mask=mask, other=0.0).to(tl.float32)
        y = y * (1.0 + scale) + shift
    if QUANTIZE:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        _store_quantized(out_ptr, scales_ptr, row, columns, mask, y, largest, IS_INT8, C)
    else:
        tl.store(out_ptr + row * C + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


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
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BLOCK)[None, :]
    place = x_ptr + batch * batch_stride + rows * row_stride + head * head_stride + d
    x = tl.load(place, mask=(rows < S) & (d < D), other=0.0).to(tl.float32)
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
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BLOCK)[None, :]
    mask = (rows < S) & (d < D)
    place = x_ptr + batch * batch_stride + rows * row_stride + head * head_stride + d
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    group = batch * heads + head // GROUP
    scale = _row_scale(tl.load(largest_ptr + group), 448.0)
    values = tl.math.div_rn(x, tl.zeros_like(x) + scale)
    tl.store(
        values_ptr + ((batch * S + rows) * N + head) * D + d,
        values.to(values_ptr.dtype.element_ty),
        mask=mask,
    )
    tl.store(scales_ptr + group, scale)


@triton.jit
def swiglu(x_ptr, out_ptr, F, x_stride, BLOCK: tl.constexpr):
    """x [M, 2F] laid out [gate ; value] -> silu(gate) * value [M, F]; one program a row and block."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < F
    gate = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x_ptr + row * x_stride + F + columns, mask=mask, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * value
    tl.store(out_ptr + row * F + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_quantize(
    x_ptr, values_ptr, scales_ptr, F, x_stride, largest, IS_INT8: tl.constexpr, BLOCK: tl.constexpr
):
    """`swiglu` and `quantize_rows` in one; one program a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < F
    gate = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x_ptr + row * x_stride + F + columns, mask=mask, other=0.0).to(tl.float32)
    y = (gate / (1.0 + tl.exp(-gate)) * value).to(x_ptr.dtype.element_ty).to(tl.float32)
    _store_quantized(values_ptr, scales_ptr, row, columns, mask, y, largest, IS_INT8, F)


@triton.jit
def gated_residual(
    x_ptr,
    branch_ptr,
    table_ptr,
    index_ptr,
    out_ptr,
    C,
    x_stride,
    branch_stride,
    entry_stride,
    BLOCK: tl.constexpr,
):
    """x + gate * branch, [M, C] each, the gate from the row's table entry; table_ptr points at the gate."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < C
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    branch = tl.load(branch_ptr + row * branch_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(table_ptr + tl.load(index_ptr + row) * entry_stride + columns, mask=mask, other=0.0)
    y = x + gate.to(tl.float32) * branch
    tl.store(out_ptr + row * C + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scaled_residual(x_ptr, branch_ptr, scale_ptr, out_ptr, C, x_stride, branch_stride, BLOCK: tl.constexpr):
    """x + scale * branch, [M, C] each, with one scale for each channel."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < C
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    branch = tl.load(branch_ptr + row * branch_stride + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * C + columns, (x + scale * branch).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def moments(x_ptr, means_ptr, squares_ptr, T, groups, run, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Mean of each piece of x [B, T, groups, run], and the sum of squared differences from it.

    Results: [B * groups, T * pieces]. Sums are of differences from the piece's first number, so that a large
    mean does not swallow them.
    """
    group, t, piece = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    base = x_ptr + ((group // groups * T + t) * groups + group % groups) * run + piece * PIECE
    count = tl.minimum(run - piece * PIECE, PIECE)
    first = tl.load(base).to(tl.float32)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, PIECE, BLOCK):
        place = start + tl.arange(0, BLOCK)
        mask = place < count
        x = tl.where(mask, tl.load(base + place, mask=mask, other=0.0).to(tl.float32) - first, 0.0)
        sums += x
        squares += x * x
    total = tl.sum(sums, axis=0)
    out = group * T * tl.num_programs(2) + t * tl.num_programs(2) + piece
    tl.store(means_ptr + out, first + total / count)
    tl.store(squares_ptr + out, tl.sum(squares, axis=0) - total * total / count)


@triton.jit
def normed(
    x_ptr,
    mean_ptr,
    factor_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    planes,
    C,
    size,
    groups,
    plane,
    ACTIVATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(x - mean) * factor * weight + bias of x [B, T, C, plane], and SiLU; planes: of one batch entry, T * C.

    mean, factor: one for each batch entry and group of `size` channels.
    """
    index = tl.program_id(0).to(tl.int64)
    channel = index % C
    group = index // planes * groups + channel // size
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < plane
    x = tl.load(x_ptr + index * plane + place, mask=mask, other=0.0).to(tl.float32)
    y = (x - tl.load(mean_ptr + group)) * tl.load(factor_ptr + group)
    y = y * tl.load(weight_ptr + channel).to(tl.float32) + tl.load(bias_ptr + channel).to(tl.float32)
    if ACTIVATE:
        y = y / (1.0 + tl.exp(-y))
    tl.store(out_ptr + index * plane + place, y.to(out_ptr.dtype.element_ty), mask=mask)


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
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Per-head RMS norm and rotate-half of x [B, S, N, D]; one program for a row and HEADS heads.

    Channel d < pairs turns with d + pairs. The partner is read from memory again, which the cache answers.
    """
    token = tl.program_id(0).to(tl.int64)
    batch, row = token // S, token % S
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    mask = (heads < N) & (d < D)
    base = x_ptr + batch * x_batch_stride + row * x_row_stride + heads * x_head_stride
    x = tl.load(base + d, mask=mask, other=0.0)
    y = x.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(y * y, axis=1) / D + eps)[:, None]
    y = y * factor
    if HAS_WEIGHT:
        y = y * tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    if ROTATE:
        turns = d < 2 * pairs
        partner = tl.where(turns, tl.where(d < pairs, d + pairs, d - pairs), d)
        other = tl.load(base + partner, mask=mask, other=0.0).to(tl.float32) * factor
        if HAS_WEIGHT:
            other = other * tl.load(weight_ptr + partner, mask=d < D, other=0.0).to(tl.float32)
        angle = batch * angle_batch_stride + row * pairs + tl.where(d < pairs, d, d - pairs)
        cos = tl.load(cos_ptr + angle, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=turns, other=0.0).to(tl.float32)
        y = y * cos + tl.where(d < pairs, -1.0, 1.0) * other * sin
    tl.store(out_ptr + (token * N + heads) * D + d, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scale_sums(
    sums_ptr,
    row_scales_ptr,
    column_scales_ptr,
    bias_ptr,
    out_ptr,
    N,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """int32 sums [M, N] times a scale a row and a scale a column, and the bias."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    y = tl.load(sums_ptr + row * N + columns, mask=mask, other=0).to(tl.float32)
    y = y * tl.load(row_scales_ptr + row) * tl.load(column_scales_ptr + columns, mask=mask, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dequantize(
    values_ptr,
    scales_ptr,
    out_ptr,
    K,
    scale_columns,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    IS_E8M0: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """values [N, K] times their block's scale. BLOCK_ROWS, BLOCK_COLUMNS: 0 for the whole side."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < K
    down = row // BLOCK_ROWS if BLOCK_ROWS > 0 else row * 0
    across = columns // BLOCK_COLUMNS if BLOCK_COLUMNS > 0 else columns * 0
    scale = tl.load(scales_ptr + down * scale_columns + across, mask=mask, other=0)
    if IS_E8M0:  # the byte is the exponent of a float32
        bits = scale.to(tl.int32)
        scale = tl.where(bits == 0, E8M0_LEAST, (bits << 23).to(tl.float32, bitcast=True))
    y = tl.load(values_ptr + row * K + columns, mask=mask, other=0.0).to(tl.float32) * scale
    tl.store(out_ptr + row * K + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def quantize_blocks_of_32(x_ptr, values_ptr, scales_ptr, K, padded_blocks, x_stride, BLOCKS: tl.constexpr):
    """x [M, K] -> e4m3 values [M, K] and e8m0 scales in the order of swizzle.py."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    columns = blocks[:, None] * 32 + tl.arange(0, 32)[None, :]
    mask = columns < K
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(x), axis=1)
    bits = amax.to(tl.int32, bitcast=True)
    # amax = (1 + fraction) * 2^e; up to 1.75 * 2^e, which is 448 = 1.75 * 2^8, the exponent is e - 8
    fraction = bits & 0x7FFFFF
    exponent = (bits >> 23) - 127 - 8 + tl.where(fraction > 0x600000, 1, 0)
    exponent = tl.where(amax > 0, tl.maximum(exponent, -127), 0)
    byte = exponent + 127
    scale = tl.where(byte == 0, E8M0_LEAST, (byte << 23).to(tl.float32, bitcast=True))
    values = tl.math.div_rn(x, tl.zeros_like(x) + scale[:, None])
    tl.store(values_ptr + row * K + columns, values.to(values_ptr.dtype.element_ty), mask=mask)
    tile = (row // 128) * (padded_blocks // 4) + blocks // 4
    place = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + blocks % 4
    tl.store(scales_ptr + place, byte.to(tl.uint8), mask=blocks * 32 < K)


@triton.jit
def quantize_blocks_of_128(x_ptr, values_ptr, scales_ptr, M, K, x_stride, BLOCKS: tl.constexpr):
    """x [M, K] -> e4m3 values [M, K] and float32 scales [K / 128, M], one for 128 channels of a row."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    columns = blocks[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = columns < K
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    scale = _row_scale(tl.max(tl.abs(x), axis=1), 448.0)
    values = tl.math.div_rn(x, tl.zeros_like(x) + scale[:, None])
    tl.store(values_ptr + row * K + columns, values.to(values_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + blocks.to(tl.int64) * M + row, scale, mask=blocks * 128 < K)
