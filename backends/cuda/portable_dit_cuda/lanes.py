"""Lanes: CUDA streams and events, together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from portable_dit.backend import Lane, Mark

T = TypeVar("T")


class CudaMark(Mark):
    """An event that was recorded."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event


class CudaLane(Lane):
    """One stream of a device. stream None: whichever the caller computes on, also inside a capture."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._fixed = stream

    @property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if self._fixed is None else self._fixed

    def run(self, function: Callable[[], T]) -> T:
        with torch.cuda.stream(self._stream):
            return function()

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """From page-locked host memory the host goes on at once; from other memory CUDA stages it first."""
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(self._stream)
        return CudaMark(event)

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark), "a mark of another device"
        self._stream.wait_event(mark.event)
