"""Capture of a call as a CUDA graph, and its replay.

A replay reads and writes fixed memory. So inputs are copied into static tensors, the output is cloned for the
caller, and every replay waits for the one before it: the graphs of one device share a pool, in which one's
intermediates lie where another's do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Lock

import torch
from torch import Tensor

WARM_UP = 2  # eager calls before a capture: kernels are compiled and libraries make their workspaces then
log = logging.getLogger("portable_dit")


class GraphPool:
    """The captured calls of one device. Made on first use, since it needs a context."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_afresh()
        self._last = torch.cuda.Event()
        self._lock = Lock()  # between the copy of inputs and the clone of the output nobody else may replay

    def _start_afresh(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)

    def capture(
        self, function: Callable[..., Tensor], example_inputs: Sequence[Tensor]
    ) -> Callable[..., Tensor] | None:
        """The function captured for inputs of these shapes; None, with the reason logged, if refused."""
        with self._lock, torch.cuda.device(self._device):
            inputs = [_static_copy(tensor) for tensor in example_inputs]
            graph = torch.cuda.CUDAGraph()
            try:
                output = self._record(graph, function, inputs)
            except RuntimeError as error:  # out of memory and errors of the capture alike
                torch.cuda.synchronize(self._device)
                self._start_afresh()  # the allocator goes on recording into a pool whose capture failed
                log.warning("no graph of this call, it runs eagerly: %s", str(error).splitlines()[0])
                return None
        return self._replay(graph, inputs, output)

    def _record(
        self, graph: torch.cuda.CUDAGraph, function: Callable[..., Tensor], inputs: Sequence[Tensor]
    ) -> Tensor:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP):
                function(*inputs)
        self._stream.synchronize()
        # thread_local: a thread that encodes a picture may use the device while this one captures.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = function(*inputs)
        current.wait_stream(self._stream)
        return output

    def _replay(
        self, graph: torch.cuda.CUDAGraph, inputs: Sequence[Tensor], output: Tensor
    ) -> Callable[..., Tensor]:
        def replay(*fresh: Tensor) -> Tensor:
            with self._lock, torch.cuda.device(self._device):
                torch.cuda.current_stream().wait_event(self._last)
                for place, tensor in zip(inputs, fresh, strict=True):
                    place.copy_(tensor)
                graph.replay()
                result = output.clone()
                self._last.record()
            return result

        return replay


def _static_copy(tensor: Tensor) -> Tensor:
    """A copy that replays may write to in inference mode and out of it."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty_like(tensor).copy_(tensor)
