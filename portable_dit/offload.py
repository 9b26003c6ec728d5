"""Offload: weights live on the host and come to the device when they are needed.

Two ways. `offload` keeps some blocks of a model on the device and streams the others through two slots,
copying the next block on a lane of its own while the present one computes. `ComponentOffload` brings a
whole component over and takes it away again.

The order that keeps it correct, for each streamed block:

    copy lane waits for the compute lane     nobody still reads the slot that is about to be overwritten
    copy lane copies host buffer -> slot
    copy lane marks
    compute lane waits for the mark          the block sees whole weights
    block runs
    its weights are let go                   tensors point at no storage, so a use out of turn fails loudly

A block that is skipped was fetched for nothing and is overwritten later; a block that nobody fetched, since
the one before it was skipped, is fetched on the spot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from portable_dit.backend import Backend, Lane, Mark
from portable_dit.capabilities import Device
from portable_dit.errors import BackendError

ALIGNMENT = 256  # bytes; what matrix units want of a weight's address
SLOTS = 2  # one computes while the other is filled


@dataclass(frozen=True)
class _Place:
    """Where one tensor of a block lies in the block's flat buffer. owner.name is the parameter or buffer."""

    owner: nn.Module
    name: str
    is_parameter: bool
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class FlatWeights:
    """All parameters and buffers of a module as one uint8 buffer on the host, and the means to move them.

    Tensors are exchanged in the module, not re-pointed: torch lets none change to a device of another kind.
    """

    def __init__(self, module: nn.Module, backend: Backend) -> None:
        self._places, self.nbytes = _lay_out(module)
        self.host = backend.host_buffer(self.nbytes)
        for place in self._places:
            _view(self.host, place).copy_(getattr(place.owner, place.name))
        self._nowhere = [
            _like(place, torch.empty_strided(place.shape, place.strides, dtype=place.dtype, device="meta"))
            for place in self._places
        ]
        self.let_go()

    def views(self, flat: Tensor) -> list[Tensor]:
        """Every tensor as a view of flat, uint8 [>= nbytes] on any device; made once, put often."""
        return [_like(place, _view(flat, place)) for place in self._places]

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Puts tensors from `views` into the module."""
        for place, tensor in zip(self._places, tensors, strict=True):
            held = place.owner._parameters if place.is_parameter else place.owner._buffers
            held[place.name] = tensor  # type: ignore[assignment]

    def let_go(self) -> None:
        """Puts meta tensors of the same shapes: no storage, and an error instead of stale numbers."""
        self.put(self._nowhere)


class LayerOffload:
    """Streams the weights of blocks through two slots on the device; made by `offload`."""

    def __init__(
        self, blocks: Sequence[nn.Module], streamed: Sequence[int], backend: Backend, device: Device
    ) -> None:
        self._synchronize = partial(backend.synchronize, device)
        self._compute: Lane = backend.compute_lane(device)
        self._copies: Lane = backend.lane(device)
        self._blocks = blocks
        self._order = list(streamed)
        _refuse_shared([blocks[index] for index in streamed])
        self._weights = {index: FlatWeights(blocks[index], backend) for index in streamed}
        largest = max(weights.nbytes for weights in self._weights.values())
        self._slots = [
            torch.empty(largest, dtype=torch.uint8, device=device.torch_device) for _ in range(SLOTS)
        ]
        self._views = {
            (index, slot): weights.views(self._slots[slot])
            for index, weights in self._weights.items()
            for slot in range(SLOTS)
        }
        self._held: list[int | None] = [None] * SLOTS
        self._marks: list[Mark | None] = [None] * SLOTS
        self._handles = [
            handle
            for index in streamed
            for handle in (
                blocks[index].register_forward_pre_hook(self._before(index)),
                blocks[index].register_forward_hook(self._after(index), always_call=True),
            )
        ]

    @property
    def host_bytes(self) -> int:
        """Bytes of weights that wait on the host."""
        return sum(weights.nbytes for weights in self._weights.values())

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots on the device."""
        return sum(slot.nbytes for slot in self._slots)

    def remove(self) -> None:
        """Takes the hooks out, leaves the weights of streamed blocks on the host and frees the slots."""
        self._synchronize()  # a prefetch may still be writing into a slot
        for handle in self._handles:
            handle.remove()
        for weights in self._weights.values():
            weights.put(weights.views(weights.host))
        self._views.clear()
        self._slots.clear()

    def _before(self, index: int) -> Any:
        def enter(module: nn.Module, inputs: object) -> None:
            if index not in self._held:
                # Neither slot is being read on the host's side; the lanes order the rest.
                self._fetch(index, slot=0)
            slot = self._held.index(index)
            mark = self._marks[slot]
            assert mark is not None
            self._compute.wait(mark)
            self._weights[index].put(self._views[index, slot])
            following = self._order[(self._order.index(index) + 1) % len(self._order)]
            if following not in self._held:
                self._fetch(following, slot=1 - slot)

        return enter

    def _after(self, index: int) -> Any:
        def leave(module: nn.Module, inputs: object, output: object) -> None:
            self._weights[index].let_go()

        return leave

    def _fetch(self, index: int, *, slot: int) -> None:
        weights = self._weights[index]
        self._copies.wait(self._compute.mark())
        self._copies.copy(self._slots[slot][: weights.nbytes], weights.host)
        self._held[slot] = index
        self._marks[slot] = self._copies.mark()


class ComponentOffload:
    """A whole component that lives on the host and visits the device."""

    def __init__(self, module: nn.Module, backend: Backend, device: Device) -> None:
        self._weights = FlatWeights(module, backend)
        self._backend = backend
        self._device = device
        self._at_home = self._weights.views(self._weights.host)
        self._weights.put(self._at_home)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the device while it visits."""
        return self._weights.nbytes

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The component's weights are on the device inside, and its device memory is free afterwards."""
        lane = self._backend.compute_lane(self._device)
        slot = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device.torch_device)
        lane.copy(slot, self._weights.host)
        self._weights.put(self._weights.views(slot))
        try:
            yield
        finally:
            self._backend.synchronize(self._device)
            self._weights.put(self._at_home)


def offload(blocks: Sequence[nn.Module], resident: int, backend: Backend, device: Device) -> LayerOffload:
    """Holds `resident` blocks on the device for good and streams the others as they are called.

    Device memory: the resident blocks and two slots of the largest streamed block. The resident ones must
    be on the device already; they are spread evenly among the others, which gives copies time to finish.
    The others may be anywhere: each is flattened into a host buffer of its own.
    """
    if not 0 <= resident < len(blocks):
        raise BackendError(
            f"layerwise offload with {resident} resident blocks: must be from 0 to {len(blocks) - 1}, one "
            "less than there are. To keep all on the device, choose offload none."
        )
    return LayerOffload(blocks, streamed_blocks(len(blocks), resident), backend, device)


def streamed_blocks(count: int, resident: int) -> tuple[int, ...]:
    """Which of count blocks are streamed when `resident` are held for good, spread evenly."""
    return tuple(
        index for index in range(count) if index * resident // count == (index + 1) * resident // count
    )


def _lay_out(module: nn.Module) -> tuple[tuple[_Place, ...], int]:
    """Every parameter and buffer with an aligned offset, and their bytes. One used twice is stored once."""
    places: list[_Place] = []
    size, offsets = 0, dict[int, int]()
    for owner, name, tensor in _tensors(module):
        if id(tensor) not in offsets:
            offsets[id(tensor)] = size
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        is_parameter = isinstance(tensor, nn.Parameter)
        shape, strides = tuple(tensor.shape), _dense_strides(tensor)
        places.append(_Place(owner, name, is_parameter, offsets[id(tensor)], shape, strides, tensor.dtype))
    return tuple(places), size


def _tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for owner in module.modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                yield owner, name, tensor


def _refuse_shared(blocks: Sequence[nn.Module]) -> None:
    """A tensor of two blocks would be let go by one while the other uses it."""
    first: dict[int, int] = {}
    for index, block in enumerate(blocks):
        for _, name, tensor in _tensors(block):
            if first.setdefault(id(tensor), index) != index:
                raise BackendError(
                    f"layerwise offload: blocks share the tensor {name!r}, and each streamed block must own "
                    "its weights. Choose offload component or none."
                )


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides when they fill its memory without gaps (a transposed weight stays
    transposed)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()


def _like(place: _Place, tensor: Tensor) -> Tensor:
    return nn.Parameter(tensor, requires_grad=False) if place.is_parameter else tensor


def _view(flat: Tensor, place: _Place) -> Tensor:
    count = 1
    for size in place.shape:
        count *= size
    data = flat[place.offset : place.offset + count * place.dtype.itemsize].view(place.dtype)
    return data.as_strided(place.shape, place.strides, data.storage_offset())
