"""A device of its own for tests: it computes as the host does, and counts what is asked of it.

Installed as a plugin, it is to the engine what an accelerator is: memory of its own, lanes, graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from portable_dit.backend import API_VERSION, AttentionKernel, Lane
from portable_dit.capabilities import Capabilities, Device, GraphLimits, Reject, Request
from portable_dit.cpu import CpuBackend
from portable_dit.masks import Mask

PLUGIN = """
from apart_device import ApartBackend
from portable_dit.hooks import hookimpl

@hookimpl
def portable_dit_backends():
    return [ApartBackend({arguments})]
"""
Call = Callable[..., Tensor]


class CountingLane(Lane):
    def __init__(self) -> None:
        self.copies = 0

    def copy(self, destination: Tensor, source: Tensor) -> None:
        self.copies += 1
        super().copy(destination, source)


class CrowdedAttention(AttentionKernel):
    """The host's kernel, for which there is no room beside captured calls of more than `room` bytes."""

    def __init__(self, kernel: AttentionKernel, backend: ApartBackend, room: int) -> None:
        self.id, self.rounds_to = kernel.id, kernel.rounds_to
        self._kernel, self._backend, self._room = kernel, backend, room

    def check(self, request: Request, capabilities: Capabilities) -> Reject | None:
        return self._kernel.check(request, capabilities)

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
        if not self._backend.replaying and self._backend.held() > self._room:
            raise torch.OutOfMemoryError("the device apart has no room for attention")
        return self._kernel.run(q, k, v, mask, scale=scale)


class ApartBackend(CpuBackend):
    """graphs: what the device says of them. captures: whether it keeps that promise.

    A captured call holds its inputs, its result, and twice that to compute in. shares: captured calls compute
    in the same memory, in which a larger one after a smaller one finds no place, and which comes back when
    all are gone. room: bytes that captured calls can have. beside: of these, what leaves room for attention.
    """

    id = "apart"
    api_version = API_VERSION
    unused_bytes = 1 << 40  # of its memory, by other processes

    def __init__(
        self,
        graphs: GraphLimits | None = None,
        *,
        captures: bool = True,
        shares: bool = False,
        room: int | None = None,
        beside: int | None = None,
    ) -> None:
        self.graphs = graphs or GraphLimits()
        self.captures = captures
        self.shares = shares
        self.room = room
        self.beside = beside
        self.lanes = [CountingLane()]
        self.captured: list[tuple[torch.Size, ...]] = []
        self.replayed: list[int] = []
        self.replaying = False
        self._alive: WeakKeyDictionary[Call, int] = WeakKeyDictionary()  # with the bytes of each
        self._scratch: list[int] = []  # what captures added to the memory that they share

    def devices(self) -> list[Device]:
        return [replace(super().devices()[0], backend=self.id, name="a device apart")]

    def capabilities(self, device: Device) -> Capabilities:
        return replace(super().capabilities(device), host_shares_memory=False, graphs=self.graphs)

    def memory(self, device: Device) -> tuple[int, int]:
        return min(self.unused_bytes, device.total_bytes), device.total_bytes

    def compute_lane(self, device: Device) -> Lane:
        return self.lanes[0]

    def lane(self, device: Device) -> Lane:
        self.lanes.append(CountingLane())
        return self.lanes[-1]

    def attention_kernels(self) -> Sequence[AttentionKernel]:
        kernels = super().attention_kernels()
        return kernels if self.beside is None else [CrowdedAttention(k, self, self.beside) for k in kernels]

    def graph(self, function: Call, example_inputs: Sequence[Tensor]) -> Call | None:
        """Replays read and write fixed memory, and see of a request only what is an input."""
        if not self.captures:
            return None
        number = len(self.captured)
        self.captured.append(tuple(t.shape for t in example_inputs))
        inputs = [t.clone() for t in example_inputs]
        output = self._inside(function, inputs).clone()

        def replay(*fresh: Tensor) -> Tensor:
            for place, tensor in zip(inputs, fresh, strict=True):
                assert place.shape == tensor.shape
                place.copy_(tensor)
            output.copy_(self._inside(function, inputs))
            self.replayed.append(number)
            return output.clone()

        self._take(replay, sum(t.nbytes for t in (*inputs, output)))
        return replay

    def trim(self, device: Device) -> None:
        """Whatever was let go is gone already."""

    def graph_bytes(self, device: Device) -> int:
        return self.held()

    def held(self) -> int:
        if not self._alive:
            self._scratch.clear()
        return sum(self._alive.values()) + sum(self._scratch)

    def _take(self, call: Call, nbytes: int) -> None:
        held = self.held()
        largest = max(self._scratch, default=0) if self.shares else 0
        scratch = 2 * nbytes if 2 * nbytes > largest else 0
        if self.room is not None and held + nbytes + scratch > self.room:
            raise torch.OutOfMemoryError(f"{nbytes + scratch} bytes for a graph beside {held}")
        if self.shares:
            self._alive[call] = nbytes
            self._scratch += [scratch] * (scratch > 0)
        else:
            self._alive[call] = 3 * nbytes

    def _inside(self, function: Call, inputs: Sequence[Tensor]) -> Tensor:
        self.replaying = True
        try:
            return function(*inputs)
        finally:
            self.replaying = False

    @property
    def copies(self) -> int:
        return sum(lane.copies for lane in self.lanes)
