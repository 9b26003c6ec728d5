"""What accelerators have in common: a backend over one of torch's device modules.

torch gives every kind of device a module of its own, named as the device is (`torch.get_device_module`), with
streams, events, memory and graphs by the same names. A backend for such a device subclasses
`AcceleratorBackend`, says how the device is called, finds its devices, states its capabilities, and lists its
kernels; streams and their order, memory and graphs are here.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from portable_dit.backend import Backend, Lane, Mark, is_short_of_memory
from portable_dit.capabilities import Device
from portable_dit.errors import BackendError

T = TypeVar("T")
ARENA_BYTES = 8 << 30
ALIGNMENT = 4096
WARM_UP = 2  # eager calls before a capture: kernels are compiled and libraries make their workspaces then
log = logging.getLogger("portable_dit")


class EventMark(Mark):
    """An event that was recorded."""

    def __init__(self, event: Any) -> None:
        self.event = event


class StreamLane(Lane):
    """One stream of a device. stream None: whichever the caller computes on, also inside a capture.

    Streams and events come from one module, the device's own: torch's generic ones and a vendor's pass each
    other by without an error on some devices.
    """

    def __init__(self, module: Any, device: torch.device, stream: Any | None = None) -> None:
        self._module = module
        self._device = device
        self._fixed = stream

    @property
    def _stream(self) -> Any:
        return self._module.current_stream(self._device) if self._fixed is None else self._fixed

    def run(self, function: Callable[[], T]) -> T:
        with self._module.stream(self._stream):
            return function()

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """From pinned memory the host goes on at once; from other memory it waits, which is always right."""
        with self._module.stream(self._stream):
            destination.copy_(source, non_blocking=source.device.type != "cpu" or source.is_pinned())

    def mark(self) -> Mark:
        event = self._module.Event()
        event.record(self._stream)
        return EventMark(event)

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, EventMark), "a mark of another kind of device"
        self._stream.wait_event(mark.event)


@dataclass(frozen=True)
class GraphStyle:
    """How a device captures.

    graph_class: the name of the graph's type in the device's module. options: what the capture is given
    besides the graph, the pool and the stream. fatal: a failed capture leaves the device unusable. waits: the
    host waits for the inputs to be in place before each replay.
    """

    graph_class: str
    options: Mapping[str, Any] = field(default_factory=dict)
    fatal: bool = False
    waits: bool = False


@dataclass(eq=False)
class _SharedMemory:
    """What several graphs compute in, in turn: each one's intermediates lie where another's do.

    handle: the allocator's pool. nbytes: what captures added to it. calls: those that are alive, with the
    bytes of their inputs. The allocator gives the memory back when the last of them is gone, and not before.
    """

    handle: Any
    nbytes: int = 0
    calls: WeakKeyDictionary[Callable[..., Tensor], int] = field(default_factory=WeakKeyDictionary)

    def held(self) -> int:
        return self.nbytes + sum(self.calls.values()) if self.calls else 0


class GraphPool:
    """The captured calls of one device. A replay reads and writes fixed memory.

    So inputs are copied into static tensors, the output is cloned for the caller, and every replay waits for
    the one before it. That order is what lets graphs share their memory, which is then near what the largest
    needs and not the sum of all: a call of fewer rows is captured inside what one of more rows left free. The
    price is that letting one go frees room for the next capture alone, and memory when all are gone.
    """

    def __init__(self, module: Any, device: torch.device, style: GraphStyle) -> None:
        self._module = module
        self._device = device
        self._style = style
        self._memories: list[_SharedMemory] = []  # the last one is captured into
        self._start_afresh()
        # One for all: libraries keep a workspace for every stream that they saw, 64 MiB on one H200.
        self._stream = module.Stream(device)
        self._last = module.Event()
        self._lock = Lock()  # between the copy of inputs and the clone of the output nobody else may replay

    def _start_afresh(self) -> None:
        self._memories = [m for m in self._memories if m.calls]
        self._memories.append(_SharedMemory(self._module.graph_pool_handle()))

    def held(self) -> int:
        """Bytes of the device that the calls which are alive hold."""
        return sum(memory.held() for memory in self._memories)

    def capture(
        self, function: Callable[..., Tensor], example_inputs: Sequence[Tensor]
    ) -> Callable[..., Tensor] | None:
        """The function captured for inputs of these shapes; None, with the reason logged, if refused.

        Raises what it met when memory was short, and BackendError where a failed capture is the end of the
        device for this process.
        """
        with self._lock, self._module.device(self._device):
            if not self._memories[-1].calls:
                self._start_afresh()  # a pool whose last graph is gone is given back, and used no more
            inputs = [_static_copy(tensor) for tensor in example_inputs]
            try:
                self._warm_up(function, inputs)
            except RuntimeError as error:  # nothing is captured yet, so nothing is broken
                self._note(error)
                return None
            graph, memory = getattr(self._module, self._style.graph_class)(), self._memories[-1]
            self._module.empty_cache()  # what the warm-up took; the capture takes its own
            before = self._module.memory_reserved(self._device)
            try:
                output = self._record(graph, function, inputs)
            except RuntimeError as error:  # out of memory and errors of the capture alike
                if self._style.fatal:
                    raise BackendError(
                        f"a capture failed ({_first_line(error)}), after which this device serves this "
                        "process no more. Start again with graphs off: --enforce-eager."
                    ) from error
                self._start_afresh()  # torch's allocator goes on recording into a pool whose capture failed
                self._stream = self._module.Stream(self._device)  # and whose stream may be left half recorded
                self._note(error)
                return None
            finally:
                memory.nbytes += max(self._module.memory_reserved(self._device) - before, 0)
            call = self._replay(graph, inputs, output)
            memory.calls[call] = sum(tensor.nbytes for tensor in inputs)
        return call

    def _note(self, error: RuntimeError) -> None:
        self._module.synchronize(self._device)
        if is_short_of_memory(error):
            raise error  # whoever asked may have something to let go
        log.warning("no graph of this call, it runs eagerly: %s", _first_line(error))

    def _warm_up(self, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            for _ in range(WARM_UP):
                function(*inputs)
        self._stream.synchronize()

    def _record(self, graph: Any, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Tensor:
        current, style = self._module.current_stream(self._device), self._style
        # The graph goes by position: modules do not agree on the name of that argument.
        with self._module.graph(graph, pool=self._memories[-1].handle, stream=self._stream, **style.options):
            output = function(*inputs)
        current.wait_stream(self._stream)
        return output

    def _replay(self, graph: Any, inputs: Sequence[Tensor], output: Tensor) -> Callable[..., Tensor]:
        def replay(*fresh: Tensor) -> Tensor:
            with self._lock, self._module.device(self._device):
                stream = self._module.current_stream(self._device)
                stream.wait_event(self._last)
                for place, tensor in zip(inputs, fresh, strict=True):
                    place.copy_(tensor)
                if self._style.waits:
                    stream.synchronize()
                graph.replay()
                result = output.clone()
                self._last.record(stream)
            return result

        return replay


def _static_copy(tensor: Tensor) -> Tensor:
    """A copy that replays may write to in inference mode and out of it."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty_like(tensor).copy_(tensor)


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


@dataclass
class PinnedArenas:
    """Page-locked buffers cut from large pieces.

    torch's allocator locks memory in powers of two, which turns 41 GiB of blocks into 53 when each is asked
    for on its own. lock: a tensor uint8 [n] of such memory, n a power of two.
    """

    lock: Callable[[int], Tensor]
    limit: int = ARENA_BYTES
    _arenas: list[tuple[Tensor, int]] = field(default_factory=list)  # each with the bytes that are given out

    def buffer(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], page-locked; its piece lives as long as any buffer in it."""
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        for index, (arena, used) in enumerate(self._arenas):
            if used + size <= arena.numel():
                self._arenas[index] = (arena, used + size)
                return arena[used : used + nbytes]
        arena = self.lock(self._size_of_next(size))
        self._arenas.append((arena, size))
        return arena[:nbytes]

    def let_go(self) -> None:
        """What is left of the pieces is given to nobody; they go with their buffers."""
        self._arenas.clear()

    def _size_of_next(self, size: int) -> int:
        """A power of two, four times the last one up to the limit, and never less than what is asked for."""
        last = self._arenas[-1][0].numel() if self._arenas else 0
        return 1 << (max(size, min(4 * last, self.limit)) - 1).bit_length()


def _locked(nbytes: int) -> Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise BackendError(
            f"page-locking {nbytes / 2**30:.2f} GiB of host memory failed: {_first_line(error)}. Raise "
            "`ulimit -l` and the container's memory limit, or keep more blocks on the device: "
            "offload.resident_blocks."
        ) from error


class AcceleratorBackend(Backend):
    """A backend over torch's module for a kind of device. device_type: what torch calls the device."""

    device_type: ClassVar[str]

    def __init__(self) -> None:
        self._pools: dict[torch.device, GraphPool] = {}
        self._arenas = PinnedArenas(_locked)

    @property
    def module(self) -> Any:
        """torch's module for the device."""
        return torch.get_device_module(self.device_type)

    def graph_style(self) -> GraphStyle | None:
        """How calls are captured; None where they are not."""
        return None

    def activate(self, device: Device) -> None:
        self.module.set_device(device.index)

    def memory(self, device: Device) -> tuple[int, int] | None:
        """Free counts what torch holds without using it. None when the driver does not say."""
        try:
            free, total = self.module.mem_get_info(device.index)
        except RuntimeError:
            return None
        idle = self.module.memory_reserved(device.index) - self.module.memory_allocated(device.index)
        return free + idle, total

    def peak_bytes(self, device: Device, *, reset: bool = False) -> int | None:
        peak: int = self.module.max_memory_reserved(device.index)
        if reset:
            self.module.reset_peak_memory_stats(device.index)
        return peak

    def synchronize(self, device: Device) -> None:
        self.module.synchronize(device.index)

    def trim(self, device: Device) -> None:
        self._arenas.let_go()
        gc.collect()
        self.module.empty_cache()

    def compute_lane(self, device: Device) -> Lane:
        return StreamLane(self.module, torch.device(device.torch_device))

    def lane(self, device: Device) -> Lane:
        where = torch.device(device.torch_device)
        return StreamLane(self.module, where, self.module.Stream(where))

    def host_buffer(self, nbytes: int) -> Tensor:
        return self._arenas.buffer(nbytes)

    def cluster_resources(self) -> Mapping[str, float]:
        """Most schedulers call any accelerator so; a vendor that goes by another name says it."""
        return {"GPU": 1.0}

    def process_group(self, device: Device) -> dict[str, Any]:
        """As the device's own limits of its collectives say."""
        limits = self.capabilities(device).collectives
        arguments: dict[str, Any] = {"backend": limits.backend}
        if limits.passes_device_id:
            arguments["device_id"] = torch.device(device.torch_device)
        return arguments

    def graph(
        self, function: Callable[..., Tensor], example_inputs: Sequence[Tensor]
    ) -> Callable[..., Tensor] | None:
        style = self.graph_style()
        if style is None:
            return None
        device = example_inputs[0].device
        if device not in self._pools:
            self._pools[device] = GraphPool(self.module, device, style)
        return self._pools[device].capture(function, example_inputs)

    def graph_bytes(self, device: Device) -> int:
        pool = self._pools.get(torch.device(device.torch_device))
        return 0 if pool is None else pool.held()
