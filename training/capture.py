"""One door to CUDA graphs and torch.compile, with an eager body that does the same on a CPU.

A captured function takes and returns nothing: it reads and writes tensors that outlive it. Random numbers
come from the device's default generator, which graphs advance on every replay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config

log = logging.getLogger("training")


def prepare_compiler(*, recompile_limit: int = 64) -> None:
    """Room for one compiled version per shape.

    Call once per process, before the first compiled call: all of it is part of the disk cache's key.
    """
    torch._dynamo.config.recompile_limit = recompile_limit
    torch._dynamo.config.accumulated_recompile_limit = 8 * recompile_limit
    torch._inductor.config.force_layout_optimization = True  # channels last for narrow convolutions too


def compiled(function: Callable[..., Any], *, enabled: bool) -> Callable[..., Any]:
    """The function compiled for static shapes, or the function itself."""
    return torch.compile(function, dynamic=False) if enabled else function


class Captured:
    """A step as a CUDA graph, or called eagerly when the device has none or capture is switched off.

    warmups run on a side stream first: they compile, choose algorithms and allocate. `undo` is called after
    them, so that they leave no trace in weights and counters. Graphs that never run at once may share
    `pool`.
    """

    def __init__(
        self,
        step: Callable[[], None],
        *,
        device: torch.device,
        enabled: bool,
        warmups: int = 3,
        pool: Any = None,
        undo: Callable[[], None] | None = None,
    ) -> None:
        self.step = step
        self.graph: Any = None
        if device.type != "cuda" or not enabled:
            return
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(warmups):
                step()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            step()
        if undo is not None:
            undo()
        torch.cuda.synchronize(device)

    @property
    def pool(self) -> Any:
        """Memory pool to hand to a later graph, None when not captured."""
        return None if self.graph is None else self.graph.pool()

    def __call__(self) -> None:
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()


class Throttle:
    """Keeps the host at most `ahead` steps before the device, so that clocks and refreshes mean something."""

    def __init__(self, device: torch.device, *, ahead: int = 8) -> None:
        self.device = device
        self.events: list[Any] = []
        self.ahead = ahead

    def __call__(self) -> None:
        if self.device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record()
        self.events.append(event)
        if len(self.events) > self.ahead:
            self.events.pop(0).synchronize()
