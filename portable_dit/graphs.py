"""Graphs: calls that a backend captures once for each shape of their inputs, and replays from then on.

Two calls are worth it: the blocks of a denoise step, and a batch of VAE tiles. Both launch hundreds of small
kernels whose shapes depend on the size of the picture alone. What a capture reads beside its inputs must
stay where it is: weights and fixed tables do (the plan captures nothing that is offloaded), and all that
belongs to a request comes as an input.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from portable_dit.backend import Backend
from portable_dit.sampling import run_blocks
from portable_dit.tiles import run_tiles

MAX_LIVE = 32  # graphs at once, or as many as the device bears; each holds the memory of its activations


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


class Graphs:
    """The captured calls of one loaded model. `refused` names the components whose capture failed once."""

    def __init__(self, backend: Backend, *, max_live: int | None = None) -> None:
        self._backend = backend
        self._max_live = min(max_live or MAX_LIVE, MAX_LIVE)
        self._live: OrderedDict[Hashable, Callable[..., Tensor] | None] = OrderedDict()
        self.refused: frozenset[str] = frozenset()

    def blocks(self, blocks: Sequence[Callable[..., Tensor]], hidden: Tensor, arguments: Any) -> Tensor:
        """`sampling.run_blocks` from a graph: hidden rows [B, S, C] -> [B, S, C]."""
        tensors: list[Tensor] = []
        structure = _take_apart((hidden, arguments), tensors)

        def run(*inputs: Tensor) -> Tensor:
            rows, rest = _put_together(structure, inputs)
            return run_blocks(blocks, rows, rest)

        return self._run("dit", structure, run, tensors)

    def tiles(self, network: Callable[[Tensor], Tensor], tiles: Tensor, most: int) -> Tensor:
        """`tiles.run_tiles` with every batch from a graph."""
        return run_tiles(lambda batch: self._batch(network, batch), tiles, most)

    def _batch(self, network: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
        return self._run("vae", _take_apart(batch, []), network, [batch])

    def _run(
        self, component: str, shape: Hashable, function: Callable[..., Tensor], inputs: Sequence[Tensor]
    ) -> Tensor:
        key = (component, shape)
        if key not in self._live:
            if len(self._live) >= self._max_live:
                self._live.popitem(last=False)  # the one that was not used for longest
            self._live[key] = self._backend.graph(function, inputs)
            if self._live[key] is None:
                self.refused |= {component}
        self._live.move_to_end(key)
        return (self._live[key] or function)(*inputs)


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
