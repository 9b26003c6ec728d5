"""What ranks say to each other: a group of ranks and the few exchanges that the parallel forms need.

Every exchange goes through the device's own collectives (torch.distributed) and is noted in a `Pulse`, so
that whoever watches the ranks can tell a rank that waits for others from one that others wait for.

Letters: B batch, S rows, N heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Pulse:
    """How far a rank has come.

    count: grows with every exchange, stage and step. doing: what it does now. waits: that is an exchange.

    Written by the thread that draws, read by the one that reports; ranks of a group count alike, so the one
    that is behind is the one the others wait for.
    """

    def __init__(self) -> None:
        self.count = 0
        self.doing = "starting"
        self.waits = False

    def beat(self, doing: str) -> None:
        self.count += 1
        self.doing = doing

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """An exchange. One that fails is left as what the rank was doing."""
        before = self.doing
        self.beat(what)
        self.waits = True
        yield
        self.waits = False
        self.beat(before)


class Group:
    """Ranks that exchange tensors, in a fixed order; with one rank nothing is sent.

    axis: what it splits. size: how many ranks. index: this rank's place among them.
    """

    def __init__(
        self, axis: str, *, size: int, index: int, handle: ProcessGroup | None, pulse: Pulse
    ) -> None:
        self.axis = axis
        self.size = size
        self.index = index
        self._handle = handle
        self._pulse = pulse

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each; x is written on."""
        if self.size > 1:
            with self._pulse.during(f"all_reduce ({self.axis})"):
                dist.all_reduce(x, group=self._handle)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """The largest of all ranks' values, element by element; x is written on."""
        if self.size > 1:
            with self._pulse.during(f"all_reduce ({self.axis})"):
                dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self._handle)
        return x

    def exchange(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """All to all: contiguous rows of dim 0, `sends[i]` of them to rank i, `receives[i]` from rank i."""
        if self.size == 1:
            return x
        out = x.new_empty(sum(receives), *x.shape[1:])
        with self._pulse.during(f"all_to_all ({self.axis})"):
            dist.all_to_all_single(out, x, list(receives), list(sends), group=self._handle)
        return out

    def gather_rows(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """[B, lengths[index], ...] of each rank -> [B, sum of lengths, ...] on all, in the ranks' order.

        Shorter parts travel filled up to the longest, since not every vendor gathers uneven ones.
        """
        if self.size == 1:
            return x
        longest = max(lengths)
        mine = x.contiguous()
        if x.shape[1] < longest:
            mine = x.new_zeros(x.shape[0], longest, *x.shape[2:])
            mine[:, : x.shape[1]] = x
        gathered = x.new_empty(self.size * x.shape[0], *mine.shape[1:])
        with self._pulse.during(f"all_gather ({self.axis})"):
            _all_gather(gathered, mine, group=self._handle)
        parts = gathered.view(self.size, *mine.shape).unbind(0)
        return torch.cat([part[:, :length] for part, length in zip(parts, lengths, strict=True)], dim=1)

    def gather_to_first(self, x: Tensor, lengths: Sequence[int]) -> Tensor | None:
        """[lengths[index], ...] of each rank -> [sum of lengths, ...] on the group's first, else None."""
        if self.size == 1:
            return x
        longest = max(lengths)
        mine = x.contiguous()
        if x.shape[0] < longest:
            mine = x.new_zeros(longest, *x.shape[1:])
            mine[: x.shape[0]] = x
        parts = [torch.empty_like(mine) for _ in range(self.size)] if self.index == 0 else None
        with self._pulse.during(f"gather ({self.axis})"):
            dist.gather(mine, parts, group=self._handle, group_dst=0)
        if parts is None:
            return None
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def pass_on(self, tensors: Sequence[Tensor], arriving: Sequence[Tensor]) -> Handover:
        """Starts sending tensors to the next rank and receiving the previous rank's into `arriving`."""
        after, before = (self.index + 1) % self.size, (self.index - 1) % self.size
        # Even ranks send first: a vendor that runs point-to-point calls in order would lock a ring of sends.
        sends = [dist.P2POp(dist.isend, t, group=self._handle, group_peer=after) for t in tensors]
        receives = [dist.P2POp(dist.irecv, t, group=self._handle, group_peer=before) for t in arriving]
        both = sends + receives if self.index % 2 == 0 else receives + sends
        self._pulse.beat(f"send and receive ({self.axis})")
        return Handover(dist.batch_isend_irecv(both), self._pulse, self.axis)

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's values on all; x is written on."""
        if self.size > 1:
            with self._pulse.during(f"broadcast ({self.axis})"):
                dist.broadcast(x, group=self._handle, group_src=0)
        return x


# Before torch 2.13 it has the older name, which later ones warn of.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class Handover:
    """Tensors on their way around a ring."""

    def __init__(self, works: Sequence[dist.Work], pulse: Pulse, axis: str) -> None:
        self._works = works
        self._pulse = pulse
        self._axis = axis

    def wait(self) -> None:
        """Returns when what was sent may be written on and what was to arrive is there."""
        with self._pulse.during(f"send and receive ({self._axis})"):
            for work in self._works:
                work.wait()


def split_evenly(count: int, parts: int) -> tuple[int, ...]:
    """Lengths that sum up to count and differ by one at most, the longer ones first."""
    return tuple(count // parts + (part < count % parts) for part in range(parts))
