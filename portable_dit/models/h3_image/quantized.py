"""The 8-bit and 4-bit distributions, back to plain weights.

Re-packed checkpoints of this family mark each quantised layer X with a small JSON tensor `X.comfy_quant` and
store its numbers in one of three ways: int8 rows in a rotated basis (INT8-ConvRot, arXiv 2512.03673), e4m3
with one scale for the tensor, or 4-bit codes in groups (W4A8). Rotation spreads outliers over 256 neighbours
before rounding; its matrix is symmetric and orthogonal, so applying it again takes it back. The plain weight
is exact in float32 up to the order of additions, and every precision or format is then made from that.

Letters: N out features, K in features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from portable_dit.errors import WeightsError
from portable_dit.models.h3_image.markers import MARKER, W4A8, Marker, read_marker
from portable_dit.models.spec import TensorSource
from portable_dit.rotation import rotate

# The tensors that a layer X may have beside X.weight, X.weight_scale (which the loader applies) and X.bias.
W4A8_SUFFIXES = ("_s_rel", "_s_channel", "_codebook", "_correction")


def plain_sources(
    shapes: Mapping[str, tuple[int, ...]], texts: Mapping[str, bytes]
) -> tuple[dict[str, TensorSource], frozenset[str]]:
    """Every stored tensor as a plain one: sources by stored name, and the names that serve others.

    texts: the bytes of the markers. Scales named `_scale` are left to the loader, which applies them before a
    source sees the tensor.
    """
    markers = {
        n.removesuffix(MARKER): read_marker(n, texts.get(n, b"")) for n in shapes if n.endswith(MARKER)
    }
    serving = {name for name in shapes if name.endswith((MARKER, ".input_scale"))}
    sources: dict[str, TensorSource] = {}
    for layer, marker in markers.items():
        name = f"{layer}.weight"
        if name not in shapes:
            raise WeightsError(f"{layer}{MARKER}: marks a layer without a weight. Download the file again.")
        parts: tuple[str, ...] = (name,)
        if marker.format == W4A8:
            parts = (name, *(n for s in W4A8_SUFFIXES if (n := name + s) in shapes))
            serving |= {*parts[1:]}
        sources[name] = TensorSource(parts, _decoder(marker, parts), by_rows=not marker.rotated)
    for name in shapes:
        if name not in serving and name not in sources and not name.endswith("weight_scale"):
            sources[name] = TensorSource((name,), _same, by_rows=True)
    used = {name for source in sources.values() for name in source.names}
    return sources, frozenset(serving - used)


def rotate_weight(weight: Tensor, channels: int) -> Tensor:
    """A weight float32 [N, K], each `channels` neighbouring in features rotated together. Its own inverse."""
    if weight.shape[-1] % channels:
        raise WeightsError(
            f"a weight of {weight.shape[-1]} in features cannot be rotated in groups of {channels}. "
            "The file does not fit its markers; download it again."
        )
    return weight if weight.is_meta else rotate(weight, channels)


def decode_w4a8(
    codes: Tensor, s_rel: Tensor, s_channel: Tensor, codebook: Tensor | None, correction: Tensor | None
) -> Tensor:
    """4-bit codes in groups, as float32 [N, K], still in the rotated basis.

    codes: int8 [N, K / 2], the even column in the low nibble. s_rel: [N, groups]; s_channel: [N]; codebook:
    [16] levels, None = the code less 8; correction: [groups, N], added to every weight of a group.
    """
    pairs = codes.view(torch.uint8)
    places = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)  # [N, K]
    levels = places.float() - 8 if codebook is None else codebook.float()[places.int()]
    if places.shape[1] % s_rel.shape[1]:
        raise WeightsError(
            f"{places.shape[1]} codes in {s_rel.shape[1]} groups: only four bits for each are read."
        )
    grouped = levels.reshape(*s_rel.shape, -1) * s_rel.float()[..., None]  # [N, groups, K / groups]
    grouped = grouped.round().clamp(-127, 127) * s_channel.float()[:, None, None]
    if correction is not None:
        grouped = grouped + correction.float().t()[..., None]
    return grouped.reshape(places.shape)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _decoder(marker: Marker, parts: tuple[str, ...]) -> Callable[..., Tensor]:
    if marker.format != W4A8:
        return (lambda weight: rotate_weight(weight, marker.rotated)) if marker.rotated else _same
    given = [any(part.endswith(suffix) for part in parts) for suffix in W4A8_SUFFIXES]
    if not all(given[:2]):
        raise WeightsError(f"{parts[0]}: marked {W4A8}, but its scales are missing. Download the file again.")

    def decode(*tensors: Tensor) -> Tensor:
        codes, *rest = tensors
        found = iter(rest)
        s_rel, s_channel, codebook, correction = (next(found) if has else None for has in given)
        assert s_rel is not None
        assert s_channel is not None
        weight = decode_w4a8(codes, s_rel, s_channel, codebook, correction)
        return rotate_weight(weight, marker.rotated) if marker.rotated else weight

    return decode
