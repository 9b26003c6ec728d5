"""A device of its own for tests: it computes as the host does, and counts what is asked of it.

Installed as a plugin, it is to the engine what an accelerator is: memory of its own, lanes, graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from portable_dit.backend import API_VERSION, Lane
from portable_dit.capabilities import Capabilities, Device, GraphLimits
from portable_dit.cpu import CpuBackend

PLUGIN = """
from apart_device import ApartBackend
from portable_dit.hooks import hookimpl

@hookimpl
def portable_dit_backends():
    return [ApartBackend({arguments})]
"""


class CountingLane(Lane):
    def __init__(self) -> None:
        self.copies = 0

    def copy(self, destination: Tensor, source: Tensor) -> None:
        self.copies += 1
        super().copy(destination, source)


class ApartBackend(CpuBackend):
    """graphs: what the device says of them. captures: whether it keeps that promise."""

    id = "apart"
    api_version = API_VERSION

    def __init__(self, graphs: GraphLimits | None = None, *, captures: bool = True) -> None:
        self.graphs = graphs or GraphLimits()
        self.captures = captures
        self.lanes = [CountingLane()]
        self.captured: list[tuple[torch.Size, ...]] = []
        self.replayed: list[int] = []

    def devices(self) -> list[Device]:
        return [replace(super().devices()[0], backend=self.id, name="a device apart")]

    def capabilities(self, device: Device) -> Capabilities:
        return replace(super().capabilities(device), host_shares_memory=False, graphs=self.graphs)

    def compute_lane(self, device: Device) -> Lane:
        return self.lanes[0]

    def lane(self, device: Device) -> Lane:
        self.lanes.append(CountingLane())
        return self.lanes[-1]

    def graph(
        self, function: Callable[..., Tensor], example_inputs: Sequence[Tensor]
    ) -> Callable[..., Tensor] | None:
        """Replays read and write fixed memory, and see of a request only what is an input."""
        if not self.captures:
            return None
        number = len(self.captured)
        self.captured.append(tuple(t.shape for t in example_inputs))
        inputs = [t.clone() for t in example_inputs]
        output = function(*inputs).clone()

        def replay(*fresh: Tensor) -> Tensor:
            for place, tensor in zip(inputs, fresh, strict=True):
                assert place.shape == tensor.shape
                place.copy_(tensor)
            output.copy_(function(*inputs))
            self.replayed.append(number)
            return output.clone()

        return replay

    @property
    def copies(self) -> int:
        return sum(lane.copies for lane in self.lanes)
