"""Guidance parallel: each of the two branches on ranks of its own, one exchange of velocities per step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from portable_dit.parallel.collectives import Group

Combine = Callable[[Tensor], Tensor]


def own_branches(count: int, group: Group) -> tuple[int, ...]:
    """The branches that this rank evaluates; a request with one branch is evaluated on all ranks alike."""
    return (group.index,) if count == group.size else tuple(range(count))


def with_all_branches(count: int, group: Group, combine: Combine) -> Combine:
    """`combine` where each rank has the velocity of its own branch: float32 [1, C, h, w] -> [1, C, h, w]."""
    if group.size == 1 or count != group.size:
        return combine

    def gather(velocity: Tensor) -> Tensor:
        return combine(group.gather_rows(velocity[None], (1,) * group.size)[0])

    return gather
