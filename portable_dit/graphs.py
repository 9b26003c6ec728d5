"""Graphs: calls that a backend captures once for each shape of their inputs, and replays from then on.

Two calls are worth it: the blocks of a denoise step, and a batch of VAE tiles. Both launch hundreds of small
kernels whose shapes depend on the size of the picture alone. What a capture reads beside its inputs must
stay where it is: weights and fixed tables do (the plan captures nothing that is offloaded), and all that
belongs to a request comes as an input.

Captured calls hold memory, and may hold as much as the plan leaves them. What they hold is known when a
capture is done, so each is judged then: the calls that were not used for longest go until the rest is within
the limit. Where a backend lets graphs share their memory, none of it comes back before the last of them has
gone; then all go, the new call is captured again into fresh memory, and the others when they are next used.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

from torch import Tensor

from portable_dit.backend import Backend, is_short_of_memory
from portable_dit.capabilities import Device
from portable_dit.sampling import run_blocks
from portable_dit.tiles import run_tiles

T = TypeVar("T")
Call = Callable[..., Tensor]
Key = tuple[str, Hashable]  # a component, and the shapes and constants of a call
MAX_LIVE = 32  # graphs at once, or as many as the device bears
LET_GO = "graphs: memory was short, so captured calls were let go; they are captured again when next used"
log = logging.getLogger("portable_dit")


class _Reason(str, Enum):
    """Why a call is not captured, for people. OVER becomes TOO_LARGE when it is so without the others too."""

    NO_CAPTURE = "the backend did not capture a call, which runs eagerly. Say --enforce-eager."
    NO_MEMORY = (
        "there was no memory left to capture a call, which runs eagerly. Stop other programs on the device, "
        "or say --enforce-eager."
    )
    TOO_LARGE = (
        "a captured call would hold more memory than graphs may, and runs eagerly. Say graphs.memory_gib=N "
        "with more, or --enforce-eager."
    )
    OVER = "captured calls together hold more memory than graphs may."


@dataclass(frozen=True)
class _Input:
    """The place of a tensor among a call's inputs."""

    position: int
    shape: tuple[int, ...]
    dtype: str
    device: str


@dataclass(frozen=True)
class _Node:
    """A tuple or dataclass of inputs and constants."""

    kind: type
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class _Eager:
    """A call that is not captured. limit: tried again when more bytes than that are allowed; None = never."""

    reason: str
    limit: int | None


class Graphs:
    """The captured calls of one loaded model.

    max_live: how many the device bears. agree: whether all ranks say yes, where blocks hold exchanges between
    them: a rank that captures runs them more often than one that does not, and would wait for it for ever. So
    ranks capture the blocks together or not at all, and let go of all captured blocks at once.
    """

    def __init__(
        self,
        backend: Backend,
        device: Device,
        *,
        max_live: int | None = None,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        self._backend = backend
        self._device = device
        self._max_live = min(max_live or MAX_LIVE, MAX_LIVE)
        self._agree = agree
        self._limit: int | None = None
        self._live: OrderedDict[Key, Call] = OrderedDict()  # in the order of their last use
        self._eager: dict[Key, _Eager] = {}
        self.refused: dict[str, str] = {}
        self.let_go: tuple[str, ...] = ()

    def begin(self, limit: int | None = None) -> None:
        """Requests start, beside which captured calls may hold `limit` bytes; None is no limit.

        From here on `let_go` says so when captured calls had to make room for them.
        """
        self.let_go = ()
        self.next_shape(limit)

    def next_shape(self, limit: int | None) -> None:
        """Pictures of one shape follow, beside which captured calls may hold `limit` bytes.

        From here on `refused` says, by component, why a call of theirs was not captured.
        """
        self._limit, self.refused = limit, {}
        self._eager = {
            key: call
            for key, call in self._eager.items()
            if call.limit is None or (limit is not None and limit <= call.limit)
        }
        if not self._within("dit"):
            self._shed("dit", until=lambda: self._within("dit"))

    def blocks(self, blocks: Sequence[Call], hidden: Tensor, arguments: Any) -> Tensor:
        """`sampling.run_blocks` from a graph: hidden rows [B, S, C] -> [B, S, C]."""
        tensors: list[Tensor] = []
        structure = _take_apart((hidden, arguments), tensors)

        def run(*inputs: Tensor) -> Tensor:
            rows, rest = _put_together(structure, inputs)
            return run_blocks(blocks, rows, rest)

        return self._run("dit", structure, run, tensors)

    def tiles(self, network: Callable[[Tensor], Tensor], tiles: Tensor, most: int) -> Tensor:
        """`tiles.run_tiles` with every batch from a graph."""
        return run_tiles(
            lambda batch: self._run("vae", _take_apart(batch, []), network, [batch]), tiles, most
        )

    def with_room(self, call: Callable[[], T]) -> T:
        """call(), and where memory is too short for it, call() once more without the captured calls.

        Not where ranks must keep in step: one that tried again alone would leave the others waiting.
        """
        try:
            return call()
        except (MemoryError, RuntimeError) as error:
            if self._agree is not None or not self._live or not is_short_of_memory(error):
                raise
        self.let_go = (LET_GO,)
        log.warning(LET_GO)
        self._give_back()
        return call()

    def _run(self, component: str, shape: Hashable, function: Call, inputs: Sequence[Tensor]) -> Tensor:
        key = (component, shape)
        if key not in self._live and key not in self._eager:
            self._capture(key, function, inputs)
        if key in self._live:
            self._live.move_to_end(key)
        else:
            self.refused[component] = self._eager[key].reason
        return self.with_room(lambda: self._live.get(key, function)(*inputs))

    def _capture(self, key: Key, function: Call, inputs: Sequence[Tensor]) -> None:
        """Puts the call among those that are live, or writes down why it runs eagerly."""
        component, reason = key[0], _Reason.TOO_LARGE
        if not self._all(component, len(self._live) < self._max_live):
            self._shed(component, until=lambda: len(self._live) < self._max_live)
        for attempt in range(2 if self._all(component, self._limit != 0) else 0):
            failed = self._try(key, function, inputs)
            if self._all(component, failed is None):
                if not self._within(component):
                    self._shed(component, until=lambda: self._within(component), keep=key)
                if self._within(component):
                    return
                failed = _Reason.OVER  # what was let go is shared with this one
            self._live.pop(key, None)
            reason = failed or _Reason.NO_CAPTURE  # None: another rank's failed
            if attempt or not self._all(component, failed in (None, _Reason.OVER, _Reason.NO_MEMORY)):
                break
            self._give_back(component)
        if not self._within(component):
            self._shed(component, until=lambda: self._within(component))
        reason = _Reason.TOO_LARGE if reason is _Reason.OVER else reason
        again = reason is _Reason.TOO_LARGE and self._agree is None
        self._eager[key] = _Eager(reason.value, self._limit if again else None)

    def _try(self, key: Key, function: Call, inputs: Sequence[Tensor]) -> _Reason | None:
        """One capture, which is live when None comes back or when it is too large by itself."""
        before = self._backend.graph_bytes(self._device)
        try:
            call = self._backend.graph(function, inputs)
        except (MemoryError, RuntimeError) as error:
            if not is_short_of_memory(error):
                raise
            return _Reason.NO_MEMORY
        if call is None:
            return _Reason.NO_CAPTURE
        self._live[key] = call
        added = self._backend.graph_bytes(self._device) - before
        return None if self._limit is None or added <= self._limit else _Reason.TOO_LARGE

    def _within(self, component: str) -> bool:
        """Whether captured calls hold no more than they may."""
        return self._all(
            component, self._limit is None or self._backend.graph_bytes(self._device) <= self._limit
        )

    def _all(self, component: str, yes: bool) -> bool:
        """Whether all ranks that capture this component say yes; for the VAE each decides for itself."""
        return yes if self._agree is None or component != "dit" else self._agree(yes)

    def _shed(self, component: str, *, until: Callable[[], bool], keep: Key | None = None) -> None:
        """Lets calls go, the one that was not used for longest first. Where ranks keep in step, all go."""
        for key in [key for key in self._live if key != keep]:
            if self._agree is None and until():
                return
            if self._agree is None or component in ("dit", key[0]):
                del self._live[key]

    def _give_back(self, component: str = "dit") -> None:
        """Lets all calls go, and their memory too."""
        self._shed(component, until=lambda: False)
        self._backend.trim(self._device)


def _take_apart(value: Any, tensors: list[Tensor]) -> Any:
    """The value with an _Input for every tensor in it, which goes to `tensors`; hashable."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Input(len(tensors) - 1, tuple(value.shape), str(value.dtype), str(value.device))
    if is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, f.name) for f in fields(value)]
    elif isinstance(value, tuple):
        parts = list(value)
    else:
        return value
    return _Node(type(value), tuple(_take_apart(part, tensors) for part in parts))


def _put_together(structure: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(structure, _Input):
        return tensors[structure.position]
    if not isinstance(structure, _Node):
        return structure
    parts = [_put_together(part, tensors) for part in structure.parts]
    return tuple(parts) if structure.kind is tuple else structure.kind(*parts)
