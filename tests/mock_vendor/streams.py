"""Streams, events and graphs of a mocked device, with what makes them hard.

A copy on a side stream arrives only when somebody waits for it, and until then its destination holds noise:
code that forgets to wait draws another picture. A captured graph is a tape of operators over the memory that
they used when they were recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mock_vendor.device import STATE, WAITS, Kind, name_of


class Stream:
    """A queue of copies that have not arrived yet."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._number = 0  # of the last copy that was put in
        self._done = 0
        STREAMS.append(self)

    def put(self, destination: Tensor, source: Tensor) -> None:
        self._waiting.append((destination, source))
        self._number += 1
        if destination.is_contiguous():
            destination.view(torch.uint8).fill_(0xFF)  # NaN in every float type

    def finish(self, number: int | None = None) -> None:
        """All copies up to that number arrive."""
        number = self._number if number is None else number
        while self._done < number:
            destination, source = self._waiting.pop(0)
            destination.copy_(source)
            self._done += 1

    def wait_stream(self, other: Stream) -> None:
        other.finish()

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _forbid_in_capture("synchronize")
        self.finish()

    def query(self) -> bool:
        return not self._waiting

    def __enter__(self) -> Stream:
        self._outer = getattr(STATE, "stream", None)
        STATE.stream = None if self is DEFAULT else self
        return self

    def __exit__(self, *error: object) -> None:
        STATE.stream = self._outer


class Event:
    """A place in a stream's queue. Without `record` it is at none, and waiting for it waits for nothing."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self._stream: Stream | None = None
        self._number = 0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or current_stream()
        self._number = self._stream._number

    def wait(self, stream: Stream | None = None) -> None:
        if self._stream is not None:
            self._stream.finish(self._number)

    def synchronize(self) -> None:
        _forbid_in_capture("synchronize")
        self.wait()

    def query(self) -> bool:
        return self._stream is None or self._stream._done >= self._number


STREAMS: list[Stream] = []
DEFAULT = Stream()


def current_stream(device: Any = None) -> Stream:
    return getattr(STATE, "stream", None) or DEFAULT


def synchronize(device: Any = None) -> None:
    _forbid_in_capture("synchronize")
    for stream in STREAMS:
        stream.finish()


@contextmanager
def use_stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


@dataclass(frozen=True)
class GraphRules:
    """What a vendor's capture bears. max_live: captured graphs at once; one more raises."""

    collectives: bool = True
    side_streams: bool = True
    max_live: int | None = None
    fatal: bool = False  # a failed capture takes the device with it


class Tape:
    """The operators of a capture in order, over the memory that they used."""

    def __init__(self, rules: GraphRules) -> None:
        self._rules = rules
        self._steps: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def forbid(self, function: Any, *, leaves: bool) -> None:
        """leaves: what it gives is on the host."""
        if name_of(function) in WAITS or leaves:
            raise RuntimeError("operation not permitted when stream is capturing: it waits for the device")
        if "c10d" in str(getattr(function, "namespace", "")) and not self._rules.collectives:
            raise RuntimeError("operation not permitted when stream is capturing: a collective")
        if (
            getattr(STATE, "stream", None) not in (None, STATE.capture_stream)
            and not self._rules.side_streams
        ):
            raise RuntimeError("operation not permitted when stream is capturing: work on a second stream")

    def add(self, body: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        self._steps.append((body, args, kwargs, result))

    def replay(self) -> None:
        for body, args, kwargs, result in self._steps:
            taken = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            fresh = body(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(fresh), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage()._cdata not in taken:
                    old.copy_(new)


def graph_types(kind: Kind, rules: GraphRules, *, first_name: str) -> tuple[type, type]:
    """The vendor's graph class and its capture context, whose first argument bears that name."""
    live: set[int] = set()

    class Graph:
        def __init__(self, keep_graph: bool = False) -> None:
            self._tape: Tape | None = None

        def replay(self) -> None:
            _forbid_in_capture("replay")
            assert self._tape is not None, "replay of a graph that was not captured"
            self._tape.replay()

        def reset(self) -> None:
            live.discard(id(self))
            self._tape = None

        def pool(self) -> tuple[int, int]:
            return (0, id(self))

        def __del__(self) -> None:
            live.discard(id(self))

    class Capture:
        def __init__(self, graph: Graph, **options: Any) -> None:
            self._graph = graph
            self._stream = options.get("stream") or Stream()

        def __enter__(self) -> None:
            if rules.max_live is not None and len(live) >= rules.max_live:
                raise RuntimeError(f"{kind.name}: {len(live)} graphs are live, no more can be made")
            self._context = use_stream(self._stream)
            self._context.__enter__()
            STATE.capture_stream = self._stream
            STATE.tape = Tape(rules)

        def __exit__(self, error_type: type | None, *error: object) -> None:
            tape, STATE.tape, STATE.capture_stream = STATE.tape, None, None
            self._context.__exit__(None, None, None)
            if error_type is None:
                live.add(id(self._graph))
                self._graph._tape = tape
            elif rules.fatal:
                kind.dead = "a capture failed; this process cannot use the device any more"

    def capture(*args: Any, **kwargs: Any) -> Capture:
        names = (first_name, "pool", "stream", "capture_error_mode")
        unknown = set(kwargs) - {*names, "auto_dispatch_capture"}
        if unknown:
            raise TypeError(f"graph.__init__() got an unexpected keyword argument {sorted(unknown)[0]!r}")
        given = dict(zip(names, args, strict=False)) | kwargs
        return Capture(given.pop(first_name), **given)

    return Graph, capture


def stream_module() -> dict[str, Any]:
    """The streams' part of torch.cuda, torch.xpu, torch.npu, torch.musa."""
    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": lambda device=None: DEFAULT,
        "stream": use_stream,
        "synchronize": synchronize,
        "is_current_stream_capturing": lambda: getattr(STATE, "tape", None) is not None,
        "graph_pool_handle": lambda: (0, 1),
    }


def _forbid_in_capture(what: str) -> None:
    if getattr(STATE, "tape", None) is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
