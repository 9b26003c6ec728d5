"""The Triton kernels behind fusions.py and linear.py. Imported only where Triton is.

A row kernel reads a row once, holds it in registers, in pieces, and writes it once. Arithmetic is float32,
rounded to the activation type once; a kernel that also quantises does so from the rounded number, so that it
gives bit for bit what the two steps give one after the other.

Letters: M rows, C channels, N heads, D head_dim.
"""

# mypy: ignore-errors
# ruff: noqa: N803, RUF005
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
def _quotient(y, scale, inverse):
    """y / scale by inverse = 1 / scale: an estimate, put right by what it leaves (Markstein).

    Rounded as a division is but for a few in 10^8, which are one bit of float32 off: 8 bits do not show it. A
    division takes ten instructions for each number, and most of a kernel's time.
    """
    estimate = y * inverse
    scale, inverse = tl.zeros_like(y) + scale, tl.zeros_like(y) + inverse
    return tl.fma(tl.fma(-estimate, scale, y), inverse, estimate)


@triton.jit
def _columns(piece, PIECE: tl.constexpr):
    """The channels of a piece, [PIECE / 8, 8].

    How threads share out a row, and so the order of its sums, follows from the widest type that is read or
    written in a shape. In this one it is 8 numbers for each thread whatever is written.
    """
    return piece * PIECE + tl.arange(0, PIECE // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _load(row_ptr, piece, C, PIECES: tl.constexpr, PIECE: tl.constexpr):
    """A piece of a row of C channels; only the last may be cut short."""
    columns = _columns(piece, PIECE)
    if piece < PIECES - 1:
        return tl.load(row_ptr + columns)
    else:
        return tl.load(row_ptr + columns, mask=columns < C, other=0.0)


@triton.jit
def _store(row_ptr, piece, y, C, PIECES: tl.constexpr, PIECE: tl.constexpr):
    columns = _columns(piece, PIECE)
    if piece < PIECES - 1:
        tl.store(row_ptr + columns, y.to(row_ptr.dtype.element_ty))
    else:
        tl.store(row_ptr + columns, y.to(row_ptr.dtype.element_ty), mask=columns < C)


@triton.jit
def _largest(y, PIECES: tl.constexpr):
    """The largest magnitude of one row, as the tuple y of its pieces."""
    top = tl.abs(y[0].to(tl.float32))
    for piece in tl.static_range(1, PIECES):
        top = tl.maximum(top, tl.abs(y[piece].to(tl.float32)))
    return tl.max(tl.max(top, axis=1), axis=0)


@triton.jit
def _store_quantized(
    row_ptr, scale_ptr, y, amax, C, largest, IS_INT8: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr
):
    """One row, as the tuple y of its pieces, as values and the scale that its largest magnitude asks for.

    No clamp: see portable_dit.formats.quantize_blocks.
    """
    scale = _row_scale(amax, largest)
    inverse = tl.math.div_rn(1.0, scale)
    for piece in tl.static_range(PIECES):
        scaled = _quotient(y[piece].to(tl.float32), scale, inverse)
        if IS_INT8:
            scaled = (scaled + ROUND) - ROUND
        _store(row_ptr, piece, scaled, C, PIECES, PIECE)
    tl.store(scale_ptr, scale)


@triton.jit
def quantize_rows(
    x_ptr,
    amax_ptr,
    values_ptr,
    scales_ptr,
    C,
    x_stride,
    largest,
    IS_GIVEN: tl.constexpr,
    IS_INT8: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """x [M, C] -> values [M, C] and scales [M]; one program a row. amax_ptr: the rows' largest, if given."""
    row = tl.program_id(0).to(tl.int64)
    x = ()
    for piece in tl.static_range(PIECES):
        x = x + (_load(x_ptr + row * x_stride, piece, C, PIECES, PIECE),)
    amax = tl.load(amax_ptr + row) if IS_GIVEN else _largest(x, PIECES)
    _store_quantized(values_ptr + row * C, scales_ptr + row, x, amax, C, largest, IS_INT8, PIECES, PIECE)


@triton.jit
def largest_of_rows(x_ptr, amax_ptr, C, x_stride, PIECES: tl.constexpr, PIECE: tl.constexpr):
    """The largest magnitude of each row of x [M, C], float32 [M]; one program a row."""
    row = tl.program_id(0).to(tl.int64)
    x = ()
    for piece in tl.static_range(PIECES):
        x = x + (_load(x_ptr + row * x_stride, piece, C, PIECES, PIECE),)
    tl.store(amax_ptr + row, _largest(x, PIECES))


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
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """RMS norm of x [M, C], then weight, then 1 + scale and shift from the row's table entry.

    table_ptr points at the shift; the scale is one chunk further. One program a row. Nothing is written
    before all is read: a read does not move ahead of a write that might go to the same place.
    """
    row = tl.program_id(0).to(tl.int64)
    if MODULATE:
        entry = table_ptr + tl.load(index_ptr + row) * entry_stride
    x = ()
    squares = tl.zeros((PIECE // 8, 8), dtype=tl.float32)
    for piece in tl.static_range(PIECES):
        part = _load(x_ptr + row * x_stride, piece, C, PIECES, PIECE)
        x = x + (part,)
        squares += part.to(tl.float32) * part.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / C + eps)
    y = ()
    for piece in tl.static_range(PIECES):
        part = x[piece].to(tl.float32) * factor
        if HAS_WEIGHT:
            part = part * _load(weight_ptr, piece, C, PIECES, PIECE).to(tl.float32)
        if MODULATE:
            shift = _load(entry, piece, C, PIECES, PIECE).to(tl.float32)
            scale = _load(entry + chunk_stride, piece, C, PIECES, PIECE).to(tl.float32)
            part = part * (1.0 + scale) + shift
        y = y + (part.to(x_ptr.dtype.element_ty if QUANTIZE else out_ptr.dtype.element_ty),)
    if QUANTIZE:
        amax = _largest(y, PIECES)
        _store_quantized(out_ptr + row * C, scales_ptr + row, y, amax, C, largest, IS_INT8, PIECES, PIECE)
    else:
        for piece in tl.static_range(PIECES):
            _store(out_ptr + row * C, piece, y[piece], C, PIECES, PIECE)


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
    x_ptr,
    values_ptr,
    scales_ptr,
    F,
    x_stride,
    largest,
    IS_INT8: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    """`swiglu` and `quantize_rows` in one; one program a row."""
    row = tl.program_id(0).to(tl.int64)
    y = ()
    for piece in tl.static_range(PIECES):
        gate = _load(x_ptr + row * x_stride, piece, F, PIECES, PIECE).to(tl.float32)
        value = _load(x_ptr + row * x_stride + F, piece, F, PIECES, PIECE).to(tl.float32)
        y = y + ((gate / (1.0 + tl.exp(-gate)) * value).to(x_ptr.dtype.element_ty),)
    amax = _largest(y, PIECES)
    _store_quantized(values_ptr + row * F, scales_ptr + row, y, amax, F, largest, IS_INT8, PIECES, PIECE)


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
    values = _quotient(x, scale[:, None], tl.math.div_rn(1.0, scale)[:, None])
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
    values = _quotient(x, scale[:, None], tl.math.div_rn(1.0, scale)[:, None])
    tl.store(values_ptr + row * K + columns, values.to(values_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + blocks.to(tl.int64) * M + row, scale, mask=blocks * 128 < K)
