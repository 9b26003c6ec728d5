"""A backend in one file, for a device that nobody makes: own memory, lanes, no float64, plain kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from portable_dit import host
from portable_dit.backend import Backend, Lane, Mark
from portable_dit.capabilities import Capabilities, Device
from portable_dit.hooks import hookimpl

T = TypeVar("T")


class SporkMark(Mark):
    def __init__(self, event: object) -> None:
        self.event = event


class SporkLane(Lane):
    def __init__(self, stream: object) -> None:
        self._stream = stream

    def run(self, function: Callable[[], T]) -> T:
        with torch.spork.stream(self._stream):
            return function()

    def copy(self, destination: Tensor, source: Tensor) -> None:
        with torch.spork.stream(self._stream):
            destination.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.spork.Event()
        event.record(self._stream)
        return SporkMark(event)

    def wait(self, mark: Mark) -> None:
        self._stream.wait_event(mark.event)


class SporkBackend(Backend):
    id = "spork"
    api_version = 1

    def devices(self) -> list[Device]:
        count = torch.spork.device_count()
        total = torch.spork.mem_get_info(0)[1]
        return [Device(self.id, i, f"spork:{i}", "Spork One", "spork1", total) for i in range(count)]

    def capabilities(self, device: Device) -> Capabilities:
        return Capabilities(
            device=device,
            count=len(self.devices()),
            dtypes=frozenset({"float32", "bfloat16"}),
            float64=False,
            async_copy=True,
            host_bytes=host.memory()[1],
        )

    def activate(self, device: Device) -> None:
        torch.spork.set_device(device.index)

    def memory(self, device: Device) -> tuple[int, int]:
        return torch.spork.mem_get_info(device.index)

    def peak_bytes(self, device: Device, *, reset: bool = False) -> int:
        peak = torch.spork.max_memory_allocated(device.index)
        if reset:
            torch.spork.reset_peak_memory_stats(device.index)
        return peak

    def synchronize(self, device: Device) -> None:
        torch.spork.synchronize(device.index)

    def compute_lane(self, device: Device) -> Lane:
        return SporkLane(torch.spork.default_stream())

    def lane(self, device: Device) -> Lane:
        return SporkLane(torch.spork.Stream())


@hookimpl
def portable_dit_backends() -> list[Backend]:
    return [SporkBackend()]
