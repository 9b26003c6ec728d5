"""Tensor parallel: layers divided over ranks by the spec's tensor plan.

Layers come in pairs. The first of a pair is divided along its out features, so that each rank computes its
own heads or its own part of the feed-forward; the second along its in features, and the ranks' results are
summed. Experts of a mixture are dealt out whole, or divided like other layers, or both.

`shrink` makes the layers smaller on the meta device, `shares_of` says which part of the checkpoint goes into
them, `share_input_scales` has ranks round their parts of a row as the whole would be, and `sum_results` adds
the sums, after the layers have become what they stay.

Letters: N out features, K in features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from portable_dit.formats import WHOLE, Agree, format_named
from portable_dit.models.spec import TensorSplit
from portable_dit.ops import ExpertLinear
from portable_dit.parallel.collectives import Group
from portable_dit.quantize import QuantizedExpertLinear, QuantizedLinear, expert_names
from portable_dit.shares import Share


def shrink(module: nn.Module, splits: Sequence[TensorSplit], group: Group, *, expert: int = 1) -> None:
    """Makes every layer of the plan as small as one rank's part of it, on the meta device.

    expert: over how many neighbours the experts of a mixture are dealt out; each expert's own layers are then
    divided over what is left of the group.
    """
    for name, split in _layers(module, splits):
        layer = module.get_submodule(name)
        inside = _inside(split, group, expert)
        assert isinstance(layer, nn.Linear | ExpertLinear)
        inputs, outputs = layer.in_features, layer.out_features
        if split.along == "out":
            outputs //= inside.size
        else:
            inputs //= inside.size
        kind = {"device": "meta", "dtype": layer.weight.dtype}
        part: nn.Linear | ExpertLinear
        if isinstance(layer, nn.Linear):
            part = nn.Linear(inputs, outputs, bias=layer.bias is not None, **kind)
        else:
            with torch.device("meta"):
                part = ExpertLinear(layer.num_experts, inputs, outputs).to(layer.weight.dtype)
            each = layer.num_experts // expert
            part.hold(group.index % expert * each, each)
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, part)


def shares_of(
    module: nn.Module,
    splits: Sequence[TensorSplit],
    group: Group,
    formats: Mapping[str, str],
    *,
    expert: int = 1,
    experts_alike: Group | None = None,
) -> dict[str, Share]:
    """The part of each divided parameter that this rank holds. formats: of layers that are quantised.

    experts_alike: the ranks that hold the same experts as this one.
    """
    shares: dict[str, Share] = {}
    for name, split in _layers(module, splits):
        layer = module.get_submodule(name)
        assert isinstance(layer, nn.Linear | QuantizedLinear | ExpertLinear | QuantizedExpertLinear)
        inside = _inside(split, group, expert)
        weights = [f"{name}.weight"]
        if isinstance(layer, ExpertLinear | QuantizedExpertLinear):
            weights = expert_names(name, layer.first, layer.num_experts)
        sharing = experts_alike if split.experts and experts_alike is not None else group
        agree = sharing.largest if sharing.size > 1 and _spans_shares(split, formats.get(name)) else None
        if split.along == "out":
            whole = layer.out_features * inside.size
            ranges = tuple(_part_of(start, stop, inside) for start, stop in _parts(split, whole))
            shares |= {weight: Share(0, whole, ranges, agree) for weight in weights}
            shares[f"{name}.bias"] = Share(0, whole, ranges)
        else:
            whole = layer.in_features * inside.size
            shares |= {weight: Share(1, whole, (_part_of(0, whole, inside),), agree) for weight in weights}
            if group.index:  # one rank adds the bias
                outputs = layer.out_features
                shares[f"{name}.bias"] = Share(0, outputs, ((0, outputs),), silent=True)
    return shares


def share_input_scales(
    module: nn.Module,
    splits: Sequence[TensorSplit],
    group: Group,
    *,
    experts_alike: Group,
) -> None:
    """Has ranks agree on an input that each quantises a part of, so that its scales are those of one device.

    What they tell each other is one float32 for each row. Blocks that end inside a part need nothing.
    """
    for name, split in _layers(module, splits):
        layer = module.get_submodule(name)
        sharing = experts_alike if split.experts else group
        if split.along == "in" and sharing.size > 1 and _input_spans(layer)[1]:
            _agree_too(layer, sharing.largest)


def share_scales_of_rows(blocks: nn.Module, group: Group) -> None:
    """Has ranks that hold some of the rows agree where a format has one scale for all of them."""
    for layer in blocks.modules():
        if _input_spans(layer)[0]:
            _agree_too(layer, group.largest)


def _agree_too(layer: nn.Module, agree: Agree) -> None:
    """Lets a quantised layer ask these ranks as well as those that it asks already."""
    assert isinstance(layer, QuantizedLinear | QuantizedExpertLinear)
    first = layer.agree
    layer.agree = agree if first is None else lambda amax: agree(first(amax))


def _input_spans(layer: nn.Module) -> tuple[bool, bool]:
    """Whether a scale of a layer's input spans all rows, and all columns; not where it is not quantised."""
    if not isinstance(layer, QuantizedLinear | QuantizedExpertLinear) or not layer.kernel.quantizes_input:
        return False, False
    rows, columns = layer.kernel.format.activations or (1, 1)
    return rows == WHOLE, columns == WHOLE


def sum_results(module: nn.Module, splits: Sequence[TensorSplit], group: Group) -> None:
    """Adds the ranks' results of every layer that is divided along its in features, or where the plan says.

    Experts that are held elsewhere give nothing, so the sum over all holders is the mixture.
    """

    def add(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return group.all_reduce(output)

    inward = [(name, split) for name, split in _layers(module, splits) if split.along == "in"]
    places = (split.sum_at.replace("*", _number(name, split)) or name for name, split in inward)
    for place in dict.fromkeys(places):
        module.get_submodule(place).register_forward_hook(add)


@dataclass(frozen=True)
class _Place:
    """One of `size` equal parts, from 0."""

    index: int
    size: int


def _inside(split: TensorSplit, group: Group, expert: int) -> _Place:
    """Which part of a layer a rank holds: of the group, or for experts of those who hold the same ones."""
    if not split.experts:
        return _Place(group.index, group.size)
    return _Place(group.index // expert, group.size // expert)


def _layers(module: nn.Module, splits: Sequence[TensorSplit]) -> Iterator[tuple[str, TensorSplit]]:
    """The names of the divided layers; `*` stands for one number."""
    for name, _ in module.named_modules():
        for split in splits:
            number = _number(name, split)
            if name == split.pattern.replace("*", number) and (number.isdigit() or "*" not in split.pattern):
                yield name, split


def _number(name: str, split: TensorSplit) -> str:
    """What `*` stands for in a name that the pattern matches."""
    before, _, after = split.pattern.partition("*")
    return name.removeprefix(before).removesuffix(after)


def _parts(split: TensorSplit, whole: int) -> list[tuple[int, int]]:
    """Start and stop of each of the things that are fused in a layer."""
    sizes = split.parts or (whole,)
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _part_of(start: int, stop: int, part: _Place) -> tuple[int, int]:
    each = (stop - start) // part.size
    return start + part.index * each, start + (part.index + 1) * each


def _spans_shares(split: TensorSplit, format: str | None) -> bool:
    """Whether one scale of the format belongs to the shares of several ranks."""
    if format is None:
        return False
    rows, columns = format_named(format).block
    return rows == WHOLE or (split.along == "in" and columns == WHOLE)
