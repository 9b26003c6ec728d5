"""Scaled products: layouts by torch's own checks for the device, numbers where the CPU has the product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from portable_dit_cuda.linear import (
    DequantizedLinear,
    FlashInferLinear,
    Fp8Block128Linear,
    Fp8RowLinear,
    Int8Linear,
    Mxfp8Linear,
    linear_kernels,
)
from portable_dit_cuda.swizzle import padded_shape, swizzle, unswizzle
from torch._subclasses.fake_tensor import FakeTensorMode

from portable_dit.capabilities import LinearRequest
from portable_dit.conformance.linear import check_linear
from portable_dit.cpu import CpuBackend
from portable_dit.formats import QUANTIZED, Encoded, decode, encode, quantize_blocks
from portable_dit.scaled_products import MatrixUnitLinear, ScaledTensorLinear

CPU = CpuBackend()
HOST = CPU.devices()[0]
SCALED = (Fp8RowLinear(), ScaledTensorLinear(), Fp8Block128Linear(), Mxfp8Linear())


@pytest.mark.parametrize(
    "kernel",
    [Fp8RowLinear(), ScaledTensorLinear(), Int8Linear(), Int8Linear("int8_row_rotated")],
    ids=lambda k: k.format.name,
)
def test_products_that_the_cpu_has_pass_conformance(kernel, machine):
    found = check_linear(kernel, CPU, HOST, machine("h200"), "bfloat16")
    assert not [o for o in found if o.status == "fail"]
    assert {o.case for o in found if o.status == "not_claimed"} == {"unaligned", "odd_features"}


@pytest.mark.parametrize("rows", [1, 17, 130, 4416])
@pytest.mark.parametrize("kernel", SCALED, ids=lambda k: k.format.name)
def test_the_device_accepts_layouts_of_values_and_scales(kernel: MatrixUnitLinear, rows: int):
    """torch checks sizes, strides, dtypes, recipes and swizzles of a product on the device without one."""
    weight = encode(torch.randn(256, 640), kernel.format.name)
    packed = kernel.pack(weight, torch.bfloat16)
    values, scales = kernel.quantize_input(torch.randn(rows, 640).bfloat16())
    with FakeTensorMode(allow_non_fake_inputs=True):

        def on_device(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

        bias = torch.empty(256, dtype=torch.bfloat16, device="cuda")
        there = {name: on_device(tensor) for name, tensor in packed.items()}
        out = kernel.apply_quantized(on_device(values), on_device(scales), there, bias, torch.bfloat16)
    assert (tuple(out.shape), out.dtype, out.device.type) == ((rows, 256), torch.bfloat16, "cuda")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_flashinfer_gets_what_its_signature_and_its_layout_ask_for(dtype, machine, stand_ins):
    blackwell = machine("b200", flashinfer_python="0.7.4")
    blackwell = replace(blackwell, dtypes=blackwell.dtypes | {dtype})
    found = check_linear(FlashInferLinear(), CPU, HOST, blackwell, dtype)
    assert not [o for o in found if o.status == "fail"], found
    assert {o.case for o in found if o.status == "not_claimed"} == {"unaligned", "odd_features"}
    assert {name for name, _ in stand_ins.calls} == {"flashinfer.mm_mxfp8"}


def test_torch_refuses_a_layout_that_is_wrong():
    """Without this the test above could pass on anything."""
    kernel = Fp8Block128Linear()
    with FakeTensorMode():
        values = torch.empty(64, 256, dtype=torch.float8_e4m3fn, device="cuda")
        weight = torch.empty(128, 256, dtype=torch.float8_e4m3fn, device="cuda")
        scales = torch.empty(2, 64, device="cuda").t()
        unpadded = {"values": weight, "scales": torch.empty(1, 2, device="cuda")}
        with pytest.raises(RuntimeError, match="128x128"):
            kernel.apply_quantized(values, scales, unpadded, None, torch.bfloat16)


def test_block_scales_lie_where_the_product_reads_them():
    kernel = Fp8Block128Linear()
    x = torch.randn(5, 384) * torch.tensor([1.0, 10.0, 100.0]).repeat_interleave(128)
    scales = kernel.quantize_input(x)[1]
    assert scales.stride() == (1, 5)
    assert torch.equal(scales, quantize_blocks(x, kernel.format, (1, 128))[1])
    weight = encode(torch.randn(256, 640), "fp8_block128")
    packed = kernel.pack(weight, torch.bfloat16)["scales"]
    assert packed.shape == (2, 8)
    assert torch.equal(packed[:, :5], weight.scales)


@pytest.mark.parametrize("rows", [1, 17, 64])
def test_block_scales_of_any_number_of_rows_lie_at_multiples_of_16_bytes(rows: int, monkeypatch):
    """What cuBLAS wants of them on the device and torch's own checks do not ask for."""
    seen = []

    def product(values, weight, *, scale_a, output_dtype, **rest):
        seen.append((values, scale_a))
        return values.float().new_ones(values.shape[0], weight.shape[1]).to(output_dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", product)
    kernel = Fp8Block128Linear()
    packed = kernel.pack(encode(torch.randn(256, 640), "fp8_block128"), torch.bfloat16)
    out = kernel.apply(torch.randn(rows, 640).bfloat16(), packed, None)
    ((values, scales),) = seen
    assert scales.stride() == (1, values.shape[0])
    assert scales.stride(1) * 4 % 16 == 0
    assert out.shape == (rows, 256)


@given(st.integers(1, 300), st.integers(1, 20), st.integers(0, 2**32))
def test_swizzling_there_and_back_changes_nothing(rows: int, columns: int, seed: int):
    scales = torch.randint(0, 256, (rows, columns), generator=torch.Generator().manual_seed(seed))
    plain = scales.to(torch.uint8).view(torch.float8_e8m0fnu)
    flat = swizzle(plain)
    assert flat.numel() == padded_shape(rows, columns)[0] * padded_shape(rows, columns)[1]
    assert torch.equal(unswizzle(flat, rows, columns).view(torch.uint8), plain.view(torch.uint8))


def test_swizzled_scales_stand_where_the_formula_says():
    """The product's documentation: element (r, c) with C padded columns, in tiles of 128 x 4."""
    rows, columns = 300, 10
    plain = torch.randint(1, 255, (rows, columns), dtype=torch.uint8)
    flat = swizzle(plain)
    padded = padded_shape(rows, columns)[1]
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * (padded // 4) + c // 4
            assert flat[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] == plain[r, c]
    assert int((flat != 0).sum()) == rows * columns  # what was added is zero


def test_swizzling_twice_is_not_swizzling_once():
    flat = swizzle(torch.arange(128 * 4, dtype=torch.uint8).view(128, 4))
    assert not torch.equal(swizzle(flat.view(128, 4)), flat)


def test_packed_mxfp8_weights_stand_for_the_stored_ones():
    weight = encode(torch.randn(256, 320), "mxfp8")
    packed = Mxfp8Linear().pack(weight, torch.bfloat16)
    back = Encoded(weight.format, packed["values"], unswizzle(packed["scales"], 256, 10))
    assert torch.equal(decode(back), decode(weight))


@pytest.mark.parametrize(
    ("kernel", "on", "request_", "code"),
    [
        (Mxfp8Linear(), "h200", ("mxfp8", "bfloat16", 64, 512, 512), "arch"),
        (Fp8Block128Linear(), "rtx-5090", ("fp8_block128", "bfloat16", 64, 512, 512), "arch"),
        (Fp8RowLinear(), "h200", ("fp8_row", "float32", 64, 512, 512), "dtype"),
        (Fp8RowLinear(), "h200", ("fp8_row", "bfloat16", 64, 500, 512), "in_features"),
        (Fp8Block128Linear(), "h200", ("fp8_block128", "bfloat16", 64, 512, 576), "out_features"),
        (Fp8RowLinear(), "h200", ("fp8_tensor", "bfloat16", 64, 512, 512), "format"),
        (DequantizedLinear("mxfp8"), "h200", ("mxfp8", "bfloat16", 64, 512, 512), "library"),
        (Int8Linear(), "h200", ("int8_row", "bfloat16", 64, 1 << 18, 512), "in_features"),
        (FlashInferLinear(), "h200", ("mxfp8", "bfloat16", 64, 512, 512), "arch"),
        (FlashInferLinear(), "b200", ("mxfp8", "bfloat16", 64, 512, 512), "library"),
        (FlashInferLinear(), "b200", ("mxfp8", "bfloat16", 64, 96, 512), "in_features"),
        (FlashInferLinear(), "b200", ("mxfp8", "bfloat16", 64, 512, 144), "out_features"),
    ],
)
def test_a_kernel_refuses_with_the_reason(kernel, on, request_, code, machine):
    reject = kernel.check(LinearRequest(*request_), machine(on))
    assert reject is not None
    assert reject.code == code


def test_every_format_has_an_exact_way_before_its_emulation():
    for name in QUANTIZED:
        ids = [kernel.id for kernel in linear_kernels()[name]]
        assert "dequantize" in ids
        assert "emulated" not in ids[: ids.index("dequantize")]
