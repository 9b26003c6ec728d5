"""Quantised number formats, as data and as two functions: `encode` a weight, `decode` it again.

A format says how numbers are stored, not who computes with them. The canonical form of every format is
values [N, K] in row-major order and plain scales [N / block rows, K / block columns], one per block, so
that a checkpoint written on one device is read on any other; a backend packs this into its private form in
memory only.

Letters: N out features, K in features, M rows of activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_dit.errors import BackendError, WeightsError, near
from portable_dit.models.spec import rotated_together
from portable_dit.rotation import rotate

WHOLE = 0  # as a block side: the whole dimension
Agree = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Format:
    """How a linear layer's numbers are stored.

    values, scales: storage dtypes; scales is None for plain dtypes. block: (rows, columns) that share one
    weight scale. activations: (rows, columns) that share one scale when the input is quantised too, which
    happens at run time from the input itself; None leaves the input alone (weight-only).

    rotated: numbers are stored in a basis in which neighbouring in features were rotated together
    (`rotation`), of weights and inputs alike, so that products do not change.

    The error of a decoded weight w obeys  |w' - w| <= max(relative * |w|, absolute * scale), in that basis.
    """

    name: str
    values: torch.dtype
    scales: torch.dtype | None = None
    block: tuple[int, int] = (1, WHOLE)
    activations: tuple[int, int] | None = None
    rotated: bool = False

    @property
    def relative(self) -> float:
        """Half a step of the value: bfloat16 keeps 7 mantissa bits and e4m3 keeps 3; int8 steps are even."""
        return {torch.bfloat16: 2.0**-8, torch.float8_e4m3fn: 2.0**-4}.get(self.values, 0.0)

    @property
    def absolute(self) -> float:
        """Half a step in units of the scale: int8's even step is 1, e4m3's subnormals are 2^-9 apart."""
        return {torch.int8: 0.5, torch.float8_e4m3fn: 2.0**-10}.get(self.values, 0.0)

    @property
    def largest(self) -> float:
        """The largest magnitude that a stored value takes: 127 for int8 (symmetric), 448 for e4m3."""
        return 127.0 if self.values is torch.int8 else torch.finfo(self.values).max

    def bytes(self, out_features: int, in_features: int) -> int:
        """Bytes of one encoded [out_features, in_features] weight with its scales."""
        size = out_features * in_features * self.values.itemsize
        if self.scales is not None:
            rows, columns = _grid((out_features, in_features), self.block)
            size += rows * columns * self.scales.itemsize
        return size


_E4M3, _E8M0, _F32 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32
FORMATS: Mapping[str, Format] = {
    f.name: f
    for f in (
        Format("float32", torch.float32),
        Format("bfloat16", torch.bfloat16),
        Format("int8_row", torch.int8, _F32, (1, WHOLE), (1, WHOLE)),
        # The form of ConvRot: outliers are spread over up to 256 channels before the even steps of int8.
        Format("int8_row_rotated", torch.int8, _F32, (1, WHOLE), (1, WHOLE), rotated=True),
        Format("int8_weight_only", torch.int8, _F32, (1, WHOLE)),
        Format("fp8_row", _E4M3, _F32, (1, WHOLE), (1, WHOLE)),
        # The input's one scale comes from all its rows, so a row's result depends on its batch mates.
        Format("fp8_tensor", _E4M3, _F32, (WHOLE, WHOLE), (WHOLE, WHOLE)),
        Format("fp8_block128", _E4M3, _F32, (128, 128), (1, 128)),
        Format("fp8_weight_only", _E4M3, _F32, (1, WHOLE)),
        # OCP Microscaling Formats v1.0: blocks of 32, power-of-two scales.
        Format("mxfp8", _E4M3, _E8M0, (1, 32), (1, 32)),
    )
}
QUANTIZED = tuple(name for name, f in FORMATS.items() if f.scales is not None)


@dataclass(frozen=True)
class Encoded:
    """A weight in canonical form: values [N, K], scales [N / block rows, K / block columns] rounded up."""

    format: Format
    values: Tensor
    scales: Tensor | None

    def __post_init__(self) -> None:
        name, shape = self.format.name, tuple(self.values.shape)
        if self.values.dtype != self.format.values or len(shape) != 2:
            raise WeightsError(
                f"{name} values of {self.values.dtype} {list(shape)}: must be {self.format.values} [N, K]. "
                "Check that the checkpoint's quantisation format is the one named in the recipe."
            )
        wanted = None if self.format.scales is None else _grid(shape, self.format.block)
        got = None if self.scales is None else tuple(self.scales.shape)
        if got != wanted or (self.scales is not None and self.scales.dtype != self.format.scales):
            kind = None if self.scales is None else self.scales.dtype
            raise WeightsError(
                f"{name} scales of {kind} {got} for values {list(shape)}: must be {self.format.scales} "
                f"{wanted}. Swizzled or transposed scales must be brought to the plain layout first."
            )


@dataclass(frozen=True)
class QuantizedRows:
    """The input of a linear layer, quantised by the seam that made it instead of by the layer.

    It stands for a tensor of shape [..., K] and dtype: values [M, K] and scales as the layer's kernel takes
    them. It goes from one module straight into the next; nothing else knows it.
    """

    format: Format
    values: Tensor
    scales: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype


def format_named(name: str) -> Format:
    """The format of that name; BackendError with the near name otherwise."""
    if name not in FORMATS:
        raise BackendError(f"quantization format {name!r} is not known.{near(name, list(FORMATS))}")
    return FORMATS[name]


def encode(weight: Tensor, name: str, *, agree: Agree | None = None) -> Encoded:
    """A weight [N, K] of any float dtype brought to canonical form, on the weight's own device.

    agree: for a part of a weight whose blocks go beyond it, the largest magnitudes of all parts.

    An all-zero block gets scale 1. Inf and NaN are refused: they would spoil their whole block, and fp8 has
    no Inf.
    """
    form = format_named(name)
    if weight.dim() != 2 or 0 in weight.shape:
        raise WeightsError(
            f"{name} of a weight {list(weight.shape)}: only non-empty matrices [N, K] are encoded."
        )
    exact = weight.float()
    if not torch.isfinite(exact).all():
        bad = int((~torch.isfinite(exact)).sum())
        raise WeightsError(
            f"{name} of a weight with {bad} Inf or NaN: the checkpoint is damaged; fetch it again."
        )
    if form.scales is None:
        return Encoded(form, weight.to(form.values), None)
    return Encoded(form, *quantize_blocks(exact, form, form.block, agree=agree))


def decode(encoded: Encoded, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight [N, K] that the stored numbers stand for; products in float32, rounded once to dtype."""
    if encoded.scales is None:
        return encoded.values.to(dtype)
    form = encoded.format
    return dequantize_blocks(encoded.values, encoded.scales, form, form.block).to(dtype)


def quantize_blocks(
    x: Tensor, form: Format, block: tuple[int, int], *, agree: Agree | None = None
) -> tuple[Tensor, Tensor]:
    """Values [M, K] in the storage dtype and scales [M / rows, K / columns] of float32 x [M, K].

    Also serves activations, with `form.activations` as block; Inf and NaN are not looked for here.
    """
    x = _turned(x, form)
    amax = _block_amax(x, block)  # [blocks down, blocks across]
    return round_blocks(x, form, block, amax if agree is None else agree(amax))


def round_blocks(x: Tensor, form: Format, block: tuple[int, int], amax: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_blocks` where the largest magnitudes are known: float32 [M / rows, K / columns].

    x: [M, K] of any float dtype, in the format's basis.
    """
    scales = (
        _power_of_two_scales(amax) if form.scales is torch.float8_e8m0fnu else _scales(amax, form.largest)
    )
    # No clamp: x / scale exceeds the largest value by one rounding at most, which the cast rounds away.
    scaled = x / _spread(scales.float(), block, x.shape)
    if form.values is torch.int8:
        scaled = scaled.round_()  # half to even, as the fp8 casts do
    return scaled.to(form.values), scales


def largest_of_blocks(x: Tensor, form: Format) -> Tensor:
    """What `quantize_blocks` asks others about an input [M, K]: the largest magnitude of each of its blocks,
    float32 [M / rows, K / columns].
    """
    assert form.activations is not None
    return _block_amax(_turned(x.float(), form) if form.rotated else x, form.activations).float()


def dequantize_blocks(values: Tensor, scales: Tensor, form: Format, block: tuple[int, int]) -> Tensor:
    """float32 [M, K] of values [M, K] and scales [M / rows, K / columns], rotated back."""
    return _turned(values.float() * _spread(scales.float(), block, values.shape), form)


def _turned(x: Tensor, form: Format) -> Tensor:
    """x [M, K] in the format's basis, or brought back from it: turning twice changes nothing."""
    return rotate(x, rotated_together(x.shape[1])) if form.rotated else x


def _scales(amax: Tensor, largest: float) -> Tensor:
    # By a tensor: some devices divide by a Python number by multiplying with its rounded inverse, and a
    # weight would get other scales there than on the host. Subnormals would give scale 0 and then 0 / 0.
    scales = (amax / amax.new_full((), largest)).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(amax > 0, scales, 1.0)


def _power_of_two_scales(amax: Tensor) -> Tensor:
    """e8m0: the least power of two that brings the block's maximum to 448 or below, within 2^-127..2^127.

    The OCP text rounds the exponent down, which clips a maximum in (448, 512) x scale; rounding up never
    clips (Mishra et al. 2025, "Recipes for pre-training LLMs with MXFP8"). Readers of the format cannot
    tell the two apart. frexp keeps it exact where log2 in float32 would not: 448 = 0.875 * 2^9.
    """
    mantissa, exponent = torch.frexp(amax)
    exponent = torch.where(mantissa > 0.875, exponent - 8, exponent - 9).clamp(-127, 127)
    exponent = torch.where(amax > 0, exponent, 0)
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    rows, columns = (-(-size // side) if side else 1 for size, side in zip(shape, block, strict=True))
    return rows, columns


def _block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    rows, columns = (side or size for size, side in zip(x.shape, block, strict=True))
    down, across = _grid(tuple(x.shape), block)
    if rows == 1 and across == 1:
        return x.abs().amax(dim=1, keepdim=True)  # [M, 1]
    padded = F.pad(x.abs(), (0, across * columns - x.shape[1], 0, down * rows - x.shape[0]))
    return padded.view(down, rows, across, columns).amax(dim=(1, 3))  # [down, across]


def _spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """Scales repeated over their blocks, broadcastable to shape [M, K]."""
    for dim, side in enumerate(block):
        if side > 1:
            scales = scales.repeat_interleave(side, dim=dim).narrow(dim, 0, shape[dim])
    return scales
