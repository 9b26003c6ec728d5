"""Runs the Triton kernels on the CPU through Triton's interpreter and prints what is wrong, one line each.

A process of its own, since TRITON_INTERPRET is read when Triton is imported. The interpreter (3.6) cuts
float32 off to bfloat16 instead of rounding, and where rounding to e4m3 reaches the next power of two it gives
the one below. So bits are compared in float32 and int8 alone; on_device.py compares the rest, and the grouped
product, whose loop has a bound from memory, which the interpreter (3.6, with NumPy 2.4 on) cannot read.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from portable_dit_cuda import experts, flash, fusions
from portable_dit_cuda.linear import DequantizedLinear, quantize_blocks_of_32
from portable_dit_cuda.swizzle import swizzle

from portable_dit import ops
from portable_dit.conformance.fused import CASES, OPTIONAL_WEIGHT, SEAMS, _cast
from portable_dit.conformance.outcome import FLOAT32_FLOOR, worst_row_error
from portable_dit.formats import FORMATS, QUANTIZED, decode, encode, quantize_blocks
from portable_dit.ops import Rotary


def seams() -> None:
    for op in fusions.FUSED_OPS:
        seam = SEAMS[op.op]
        for case in CASES:
            if case.rows > 100 or not (case.weight or op.op in OPTIONAL_WEIGHT):
                continue
            arguments = tuple(_cast(a, torch.float32) for a in seam.inputs(case))
            error = worst_row_error(
                op.run(*arguments), seam.oracle(*(_cast(a, torch.float64) for a in arguments))
            )
            if not error < FLOAT32_FLOOR:
                print(f"{op.op} {case.name}: error {error:.2e}")


def around_experts() -> None:
    """The seams of a mixture of experts against their plain bodies."""
    generator = torch.Generator().manual_seed(5)
    for batch, rows, heads, dim in ((1, 17, 5, 64), (2, 33, 8, 128), (1, 1, 3, 24)):
        packed = torch.randn(batch, rows, heads + 2, dim, generator=generator)
        angles = torch.rand(1, rows, dim // 2, generator=generator) * 6
        weight = torch.randn(dim, generator=generator)
        arguments = packed[:, :, 1:-1], weight, 1e-5, Rotary(angles.cos(), angles.sin())
        off = experts.rotary_head_norm(*arguments) - ops.rotary_head_norm(*arguments)
        if not off.abs().max() < 3e-6:
            print(f"rotary_head_norm {batch}x{rows}x{heads}x{dim}: off by {off.abs().max():.1e}")
    for count, choices, channels in ((9, 2, 100), (40, 8, 1500), (1, 1, 3)):
        x = torch.randn(count * choices, channels, generator=generator)
        places = torch.randperm(count * choices, generator=generator).view(count, choices)
        shares = torch.rand(count, choices, generator=generator)
        off = experts.combine_experts(x, places, shares) - ops.combine_experts(x, places, shares)
        if not off.abs().max() < 3e-6:
            print(f"combine_experts {count}x{choices}x{channels}: off by {off.abs().max():.1e}")


def dealt() -> None:
    """Choices in the order of their experts, with experts elsewhere too."""
    generator = torch.Generator().manual_seed(6)
    for rows, each, count, first, held in (
        (99, 8, 64, 0, 64),
        (99, 8, 64, 48, 16),
        (1, 1, 3, 0, 3),
        (700, 2, 5, 1, 2),
    ):
        index = torch.rand(rows, count, generator=generator).topk(each, dim=1).indices
        (got, places), (wanted, wanted_places) = (
            function(index, first, held, count) for function in (experts.deal, ops.deal)
        )
        same = torch.equal(got.rows, wanted.rows) and torch.equal(got.ends, wanted.ends)
        if not same or not torch.equal(places, wanted_places):
            print(f"deal {rows}x{each} of {count}, {held} from {first}: differs")


def rows_in_8_bits() -> None:
    x = torch.randn(37, 300, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 37)[:, None]
    x[3] = 0
    for name in ("fp8_row", "int8_row"):
        form = FORMATS[name]
        values, scales = fusions.quantize_rows(x, form)
        wanted, wanted_scales = quantize_blocks(x, form, (1, 0))
        wrong = (values.float() != wanted.float()).float().mean()
        if not torch.equal(scales, wanted_scales) or wrong > (0.03 if name == "fp8_row" else 0):
            print(f"quantize_rows {name}: scales or values differ")
        whole = fusions.largest_of_rows(x)
        parts = [fusions.quantize_rows(part, form, whole) for part in x.split(150, dim=1)]
        joined = torch.cat([part.float() for part, _ in parts], dim=1)
        if not all(torch.equal(part, scales) for _, part in parts) or not joined.equal(values.float()):
            print(f"quantize_rows {name}: parts of a row differ from the whole")
    produced(FORMATS["int8_row"])


def heads_in_8_bits() -> None:
    """Queries, keys and values as 8-bit attention takes them, of strided slices too."""
    packed = torch.randn(2, 130, 3, 4, 24, generator=torch.Generator().manual_seed(3)) * 7
    for x, heads in ((packed[:, :, 0], 4), (packed[:, :, 1], 2)):
        values, scales = fusions.quantize_heads(x, heads)
        wanted, wanted_scales = flash.quantize_heads_plainly(x, heads)
        wrong = (values.float() != wanted.float()).float().mean()
        if not torch.equal(scales, wanted_scales) or wrong > 0.03:
            print(f"quantize_heads {heads}: scales or values differ")


def produced(form) -> None:
    """What producers quantise equals their own result, quantised."""
    seam = SEAMS["norm_modulate"]
    arguments = seam.inputs(CASES[3])
    rows = fusions.norm_modulate_quantized(*arguments, form=form)
    wanted, wanted_scales = quantize_blocks(fusions.norm_modulate(*arguments).flatten(0, 1), form, (1, 0))
    if not (torch.equal(rows.values, wanted) and torch.equal(rows.scales, wanted_scales)):
        print("norm_modulate_quantized differs from its two steps")
    x = torch.randn(3, 5, 400)
    rows = fusions.swiglu_quantized(x, form=form)
    wanted, wanted_scales = quantize_blocks(fusions.swiglu(x).flatten(0, 1), form, (1, 0))
    if not (torch.equal(rows.values, wanted) and torch.equal(rows.scales, wanted_scales)):
        print("swiglu_quantized differs from its two steps")


def blocks_of_32() -> None:
    x = torch.randn(150, 320) * torch.rand(150, 1) * 1000
    x[5] = 0
    x[7, :32], x[7, 32:64], x[7, 64:96] = 448.0, 449.0, 2.0**-130
    scales = quantize_blocks_of_32(x, FORMATS["mxfp8"])[1]
    _, wanted_scales = quantize_blocks(x, FORMATS["mxfp8"], (1, 32))
    if not torch.equal(scales.view(torch.uint8), swizzle(wanted_scales).view(torch.uint8)):
        print("quantize_blocks_of_32: scales differ")


def blocks_of_128() -> None:
    x = torch.randn(37, 384)
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(3, 37)
    fusions.kernels().quantize_blocks_of_128[(37, 1)](x, values, scales, 37, 384, x.stride(0), BLOCKS=8)
    if not torch.equal(scales.t(), quantize_blocks(x, FORMATS["fp8_block128"], (1, 128))[1]):
        print("quantize_blocks_of_128: scales differ")


def weights() -> None:
    for name in QUANTIZED:
        weight = encode(torch.randn(256, 384), name)
        kernel = DequantizedLinear(name)
        if not torch.equal(kernel.weight(kernel.pack(weight, torch.float32), torch.float32), decode(weight)):
            print(f"dequantize {name}: differs")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for part in (
        seams,
        around_experts,
        dealt,
        rows_in_8_bits,
        heads_in_8_bits,
        blocks_of_32,
        blocks_of_128,
        weights,
    ):
        part()
    print("done")
