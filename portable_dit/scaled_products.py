"""Linear layers on 8-bit matrix units through torch's own scaled products, for the backends that have them.

Weights keep the canonical order [N, K]; a product wants the second matrix column-major, which is a view of
it. Inputs are quantised on the way in by `quantize_input`, and by `quantize_divided` where devices share a
row. A vendor may replace either with a faster one that gives the same numbers.

Letters: M rows, N out features, K in features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_dit.backend import LinearKernel, Packed
from portable_dit.capabilities import Capabilities, LinearRequest, Reject
from portable_dit.formats import Agree, Encoded, largest_of_blocks, quantize_blocks, round_blocks

INT8_ROWS = 32  # torch._int_mm wants more than 16 rows


class MatrixUnitLinear(LinearKernel):
    """What the native kernels share. multiple: of K and N, which the matrix units ask for."""

    quantizes_input = True
    agrees = True
    dtypes: frozenset[str] = frozenset({"bfloat16"})
    multiple: tuple[int, int] = (16, 16)

    def refuse(self, request: LinearRequest, capabilities: Capabilities) -> Reject | None:
        name = self.format.name
        if not capabilities.multiplies(name):
            arch = capabilities.device.arch
            return Reject(
                "arch", f"{arch} or this build of torch does not multiply {name} in its matrix units"
            )
        if request.dtype not in self.dtypes:
            return Reject("dtype", f"takes {', '.join(sorted(self.dtypes))}, not {request.dtype}")
        for what, size, of in (
            ("in_features", request.in_features, self.multiple[0]),
            ("out_features", request.out_features, self.multiple[1]),
        ):
            if size % of:
                return Reject(what, f"{size} {what.replace('_', ' ')} are no multiple of {of}")
        return self.refuse_further(request, capabilities)

    def refuse_further(self, request: LinearRequest, capabilities: Capabilities) -> Reject | None:
        """What only this kernel refuses, such as a library that is not there."""
        return None

    def apply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        values, scales = self.quantize_input(x)
        return self.apply_quantized(values, scales, packed, bias, x.dtype)

    def apply_divided(self, x: Tensor, packed: Packed, bias: Tensor | None, agree: Agree) -> Tensor:
        values, scales = self.quantize_divided(x, agree)
        return self.apply_quantized(values, scales, packed, bias, x.dtype)

    def quantize_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, K] as values and scales the way `apply_quantized` takes them."""
        assert self.format.activations is not None
        return self.arrange(*quantize_blocks(x.float(), self.format, self.format.activations))

    def quantize_divided(self, x: Tensor, agree: Agree) -> tuple[Tensor, Tensor]:
        """`quantize_input` for a part of an input that is divided over devices; agree: see `apply_divided`.

        For formats whose scales go beyond a part; blocks that end inside it need nobody else.
        """
        form, block = self.format, self.format.activations
        assert block is not None
        if form.rotated:
            return self.arrange(*quantize_blocks(x.float(), form, block, agree=agree))
        # No copy in float32: a largest magnitude is exact in any dtype, and the quotient is float32.
        return self.arrange(*round_blocks(x, form, block, agree(largest_of_blocks(x, form))))

    def arrange(self, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Canonical values [M, K] and scales [M / rows, K / columns] the way `apply_quantized` takes them."""
        return values, scales

    def apply_quantized(
        self, values: Tensor, scales: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """[M, N] in dtype; scales as `quantize_input` gives them."""
        raise AssertionError("each kernel has its own")


class ScaledLinear(MatrixUnitLinear):
    """e4m3 through torch's scaled product, input and weight scaled the same way. recipe: which way.

    fast_accumulation: sums stay in the matrix unit's own registers, where a device has the choice.
    """

    recipe: F.ScalingType

    def __init__(self, format: str, id: str, *, fast_accumulation: bool) -> None:
        super().__init__(format, id)
        self.fast_accumulation = fast_accumulation

    def apply_quantized(
        self, values: Tensor, scales: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        return F.scaled_mm(
            values,
            packed["values"].t(),
            scale_a=scales,
            scale_recipe_a=self.recipe,
            scale_b=packed["scales"],
            scale_recipe_b=self.recipe,
            bias=bias,
            output_dtype=dtype,
            use_fast_accum=self.fast_accumulation,
        )


class ScaledRowLinear(ScaledLinear):
    """e4m3 with a scale for each input row and each output channel."""

    takes_quantized = True
    recipe = F.ScalingType.RowWise

    def __init__(self, id: str = "scaled_mm", *, fast_accumulation: bool = False) -> None:
        super().__init__("fp8_row", id, fast_accumulation=fast_accumulation)

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        assert weight.scales is not None
        return {"values": weight.values, "scales": weight.scales.reshape(1, -1)}  # [1, N]


class ScaledTensorLinear(ScaledLinear):
    """e4m3 with one scale for all of the input and one for the weight. A row depends on its batch mates."""

    dtypes = frozenset({"bfloat16", "float16"})
    recipe = F.ScalingType.TensorWise

    def __init__(self, id: str = "scaled_mm", *, fast_accumulation: bool = False) -> None:
        super().__init__("fp8_tensor", id, fast_accumulation=fast_accumulation)

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        """Scales [4], of which the first counts: those of experts lie one behind the other, and each has to
        start at a multiple of 16 bytes.
        """
        assert weight.scales is not None
        return {"values": weight.values, "scales": F.pad(weight.scales.reshape(1), (0, 3))}

    def apply_quantized(
        self, values: Tensor, scales: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        first = {**packed, "scales": packed["scales"].narrow(0, 0, 1)}
        return super().apply_quantized(values, scales, first, bias, dtype)

    def arrange(self, values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        return values, scales.reshape(1)


class ScaledBlocksOf32Linear(MatrixUnitLinear):
    """e4m3 in blocks of 32 with power-of-two scales. order: how the product wants the scales laid out."""

    multiple = (32, 16)
    order = F.SwizzleType.NO_SWIZZLE

    def __init__(self, id: str = "scaled_mm") -> None:
        super().__init__("mxfp8", id)

    def apply_quantized(
        self, values: Tensor, scales: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        blocks = F.ScalingType.BlockWise1x32
        out = F.scaled_mm(
            values,
            packed["values"].t(),
            scale_a=scales,
            scale_recipe_a=blocks,
            scale_b=packed["scales"],
            scale_recipe_b=blocks,
            swizzle_a=self.order,
            swizzle_b=self.order,
            output_dtype=dtype,
        )
        return out if bias is None else out + bias


class Int8RowLinear(MatrixUnitLinear):
    """int8 with a scale for each input row and each output channel, summed in int32; rotated or not."""

    dtypes = frozenset({"bfloat16", "float16"})

    def __init__(self, format: str = "int8_row", id: str = "int8_mm") -> None:
        super().__init__(format, id)
        self.takes_quantized = not self.format.rotated  # no producer rotates

    def refuse_further(self, request: LinearRequest, capabilities: Capabilities) -> Reject | None:
        if request.in_features * 127 * 127 >= 1 << 31:
            return Reject("in_features", f"{request.in_features} products of 127 x 127 overflow int32 sums")
        return None

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        assert weight.scales is not None
        return {"values": weight.values, "scales": weight.scales.reshape(1, -1)}  # [1, N]

    def apply_quantized(
        self, values: Tensor, scales: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        rows = values.shape[0]
        if rows < INT8_ROWS:
            values = F.pad(values, (0, 0, 0, INT8_ROWS - rows))
        sums = torch._int_mm(values, packed["values"].t())[:rows]  # [M, N] int32
        return self.scale(sums, scales, packed["scales"], bias, dtype)

    def scale(
        self, sums: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """int32 sums [M, N] times scales [M, 1] and [1, N], in dtype."""
        out = sums.float().mul_(rows).mul_(columns)
        return (out if bias is None else out.add_(bias)).to(dtype)
