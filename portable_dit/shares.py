"""Shares: which part of a parameter one rank holds, found in the stored tensors before they are read.

A parameter is often made of stored rows in another order (three projections joined, halves exchanged, heads
put together). For such a source the order is learned by sending row numbers through it instead of rows; then
a share is a few runs of stored rows and columns, and nothing else of the files is touched.

Letters: N out features, K in features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from portable_dit.models.spec import TensorSource
from portable_dit.safetensors_file import StoredTensor


@dataclass(frozen=True)
class Share:
    """A part of a parameter: these ranges of `whole` entries along a dim, one after the other.

    agree: the largest of the ranks' values, for scales of a format that span more than one share. silent: in
    place of the values come zeros, since another rank holds them (a bias that is added once).
    """

    dim: int
    whole: int
    ranges: tuple[tuple[int, int], ...]
    agree: Callable[[Tensor], Tensor] | None = None
    silent: bool = False

    def cut(self, whole: Tensor) -> Tensor:
        """The share of a parameter that is there as a whole."""
        if self.silent:
            return torch.zeros_like(whole)
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)


@dataclass(frozen=True)
class Run:
    """Rows first..last - 1 of a stored tensor; columns: of them, or None for whole rows."""

    part: StoredTensor
    first: int
    last: int
    columns: tuple[int, int] | None

    @property
    def nbytes(self) -> int:
        row = self.part.nbytes // max(self.part.shape[0], 1)
        if self.columns is None:
            return row * (self.last - self.first)
        width = self.columns[1] - self.columns[0]
        return row * (self.last - self.first) * width // self.part.shape[1]

    def pieces(self, most: int) -> list[Run]:
        """This run in runs of at most so many bytes, or one row."""
        rows = max(most * (self.last - self.first) // max(self.nbytes, 1), 1)
        starts = range(self.first, self.last, rows)
        return [replace(self, first=start, last=min(start + rows, self.last)) for start in starts]

    def of(self, tensor: Tensor) -> Tensor:
        """These rows and columns of the stored tensor, or of one scale for each of its rows."""
        rows = tensor[self.first : self.last]
        if self.columns is None or rows.shape[1:] != self.part.shape[1:]:
            return rows
        return rows[:, self.columns[0] : self.columns[1]]


def runs_of(source: TensorSource, parts: Sequence[StoredTensor], share: Share) -> tuple[Run, ...] | None:
    """The stored rows and columns that a share is made of, in order; None when the source mixes rows."""
    if not source.by_rows or share.silent or share.dim > 1 or len({part.shape[1:] for part in parts}) != 1:
        return None
    counts = [part.shape[0] for part in parts]
    starts = [sum(counts[:place]) for place in range(len(parts))]
    numbers = [
        torch.arange(start, start + count)[:, None] for start, count in zip(starts, counts, strict=True)
    ]
    order: Tensor = source.make(*numbers)[:, 0]
    if len(order) != sum(counts):
        return None
    columns: tuple[int, int] | None = None
    if share.dim == 0:
        order = share.cut(order)
    elif len(share.ranges) == 1:
        columns = share.ranges[0]
    else:
        return None
    return tuple(
        Run(parts[place], first - starts[place], last - starts[place], columns)
        for place, first, last in _stretches(order.tolist(), starts)
    )


def _stretches(order: Sequence[int], starts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(part, first, last) of each stretch of numbers that follow each other inside one part."""
    borders = {*starts}
    found: list[tuple[int, int, int]] = []
    for number in order:
        if found and number == found[-1][2] and number not in borders:
            found[-1] = (found[-1][0], found[-1][1], number + 1)
        else:
            place = max(place for place, start in enumerate(starts) if start <= number)
            found.append((place, number, number + 1))
    return found
