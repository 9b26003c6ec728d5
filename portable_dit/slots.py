"""Slots: where the tensors of a module on the meta device go, each by its name.

A parameter or buffer takes its tensor; a quantised layer encodes its weight on arrival; experts of a mixture,
which lie in one stacked weight, have a slot each, so that none of them waits for the others in memory.

Letters: N out features, K in features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from portable_dit.errors import WeightsError
from portable_dit.formats import Encoded, encode
from portable_dit.ops import ExpertLinear
from portable_dit.quantize import QuantizedExpertLinear, QuantizedLinear, expert_names, quantized_weights

if TYPE_CHECKING:
    from portable_dit.shares import Share
    from portable_dit.weights import Made


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter or buffer of a module that waits for its tensor."""

    owner: nn.Module
    leaf: str
    meta: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.meta.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    def fill(self, tensor: Tensor) -> None:
        is_parameter = isinstance(self.meta, nn.Parameter)
        setattr(self.owner, self.leaf, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


@dataclass(frozen=True, eq=False)
class ExpertSlot:
    """One expert's part of a stacked weight, for all of which there is room when the first one comes."""

    layer: ExpertLinear
    expert: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layer.out_features, self.layer.in_features

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.weight.dtype

    def fill(self, tensor: Tensor) -> None:
        weight = self.layer.weight
        if weight.is_meta:
            stacked = torch.empty(weight.shape, dtype=weight.dtype, device=tensor.device)
            self.layer.weight = nn.Parameter(stacked, requires_grad=False)
        with torch.no_grad():
            self.layer.weight[self.expert].copy_(tensor)


@dataclass(frozen=True, eq=False)
class QuantizedSlot:
    """The weight of a quantised layer, or of one of its experts, which the layer encodes as it comes."""

    layer: QuantizedLinear | QuantizedExpertLinear
    expert: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layer.out_features, self.layer.in_features

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.dtype

    def encoded(self, weight: Tensor, share: Share | None = None) -> Encoded:
        """A weight in the layer's format, on the device where it is; share: which part of the whole it is."""
        agree = None if share is None else share.agree
        return encode(weight, self.layer.kernel.format.name, agree=agree)

    def put(self, encoded: Encoded) -> None:
        """Takes a weight that is encoded already."""
        if isinstance(self.layer, QuantizedLinear):
            self.layer.accept_encoded(encoded)
        else:
            self.layer.accept_encoded(self.expert, encoded)

    def accept(self, source: Made, place: str, encode_on: str) -> Encoded:
        """Takes the weight to the place, encoded on the way unless it is stored so; gives what was taken."""
        encoded = source.encoded(self.layer.kernel.format)
        if encoded is None:
            weight = source.read(self.shape, encode_on).to(device=encode_on, copy=True)
            encoded = self.encoded(weight, source.share)
            del weight
            encoded = encoded if encode_on == place else placed(encoded, place)
        else:
            encoded = placed(encoded, place)
        self.put(encoded)
        return encoded


def rounded(source: Made, slot: Slot | ExpertSlot, place: str) -> Tensor:
    """What the slot takes, at the place and in its dtype. Raises WeightsError for what that cannot hold."""
    tensor = source.read(slot.shape, place)
    held = tensor.to(device=place, dtype=slot.dtype, copy=True)
    narrowed = held.is_floating_point() and torch.finfo(held.dtype).max < torch.finfo(tensor.dtype).max
    # By the two bounds alone: a test of each value takes memory of the tensor's size.
    if narrowed and tensor.numel() and not torch.stack(tensor.aminmax()).to(held.dtype).isfinite().all():
        kind = str(held.dtype).removeprefix("torch.")
        raise WeightsError(f"{source.name}: it has values beyond {kind}. Say precision=float32.")
    return held


def placed(encoded: Encoded, place: str) -> Encoded:
    """An encoded weight in memory of its own at the place."""
    scales = None if encoded.scales is None else encoded.scales.to(device=place, copy=True)
    return Encoded(encoded.format, encoded.values.to(device=place, copy=True), scales)


Target = Slot | ExpertSlot | QuantizedSlot


def targets_of(module: nn.Module) -> dict[str, Target]:
    """Everything of a module that waits for a tensor, by the name under which a checkpoint's map has it."""
    targets: dict[str, Target] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        if isinstance(owner, ExpertLinear):
            names = expert_names(path, owner.first, owner.num_experts)
            targets |= {own: ExpertSlot(owner, expert) for expert, own in enumerate(names)}
        else:
            targets[name] = Slot(owner, leaf, tensor)
    for name, (layer, expert) in quantized_weights(module).items():
        targets[name] = QuantizedSlot(layer, expert)
    return targets
