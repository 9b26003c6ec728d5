"""Sequence parallel: the rows of a step split over ranks between `embed` and `head`.

Between attentions a rank needs only its own rows. At an attention, Ulysses exchanges rows for heads, so that
each rank sees all rows of its share of the heads; the ring keeps all heads and passes keys and values around.
Both together: Ulysses inside, between neighbours, and the ring outside.

Rows are split as evenly as they go, in order, and parts may differ by one row: nothing is filled up and
nothing is masked for it. How a sequence was split travels with the mask (`masks.Part`), at run time, so that
nothing can be left over from another size.

Letters: B batch, S rows, N heads, D head_dim, P shared keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from portable_dit.masks import KeyPadding, Mask, NoMask, Part
from portable_dit.models.spec import Denoiser
from portable_dit.ops import Attention
from portable_dit.parallel.collectives import Group, split_evenly
from portable_dit.parallel.mesh import Mesh
from portable_dit.sampling import BlockRunner

Attend = Callable[..., Tensor]
AttendWithLse = Callable[..., tuple[Tensor, Tensor]]


def parallelize_sequence(blocks: nn.Module, mesh: Mesh, attend_with_lse: AttendWithLse | None) -> None:
    """Puts Ulysses and the ring around every attention of the blocks, after kernels were bound.

    attend_with_lse: the kernel that also gives the log-sum-exp, which a ring needs.
    """
    ulysses, ring = mesh.group("ulysses"), mesh.group("ring")
    for module in blocks.modules():
        if isinstance(module, Attention):
            whole: Attend = module.run
            inner = whole
            if ring.size > 1:
                assert attend_with_lse is not None
                inner = RingAttention(ring, ulysses.size, attend_with_lse)
            module.run = UlyssesAttention(ulysses, ring, inner, whole)


@dataclass(frozen=True)
class SplitRows:
    """Runs blocks on this rank's rows and gives back all of them; a `sampling.BlockRunner`.

    run: how the blocks themselves are called.
    """

    denoiser: Denoiser
    group: Group
    run: BlockRunner

    def __call__(
        self, blocks: Sequence[Callable[..., Tensor]], hidden: Tensor, arguments: tuple[Any, ...]
    ) -> Tensor:
        """Hidden rows [B, S, C] -> [B, S, C]."""
        lengths = split_evenly(hidden.shape[1], self.group.size)
        start = sum(lengths[: self.group.index])
        mine = hidden[:, start : start + lengths[self.group.index]]
        part = self.denoiser.part(arguments, lengths, self.group.index)
        return self.group.gather_rows(self.run(blocks, mine, part), lengths)


class UlyssesAttention:
    """Attention over all rows of some heads: rows are exchanged for heads before, and back after.

    inner: attends over the rows of one place of the ring; without a ring these are all rows. whole: attends
    over rows that were not split, which every rank has (a prefix that runs once).
    """

    def __init__(self, group: Group, ring: Group, inner: Attend, whole: Attend) -> None:
        self._group = group
        self._ring = ring
        self._inner = inner
        self._whole = whole

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
        """q [B, S of this rank, N, D], k and v [B, P + S of this rank, Nkv, D] -> as q."""
        if not isinstance(mask, Part):
            return self._whole(q, k, v, mask, scale=scale)
        degree = self._group.size
        first = self._ring.index * degree
        lengths = mask.lengths[first : first + degree]  # of this place of the ring
        # Key heads that are fewer than the ranks go to several of them.
        copies = degree // math.gcd(k.shape[2], degree)
        if copies > 1:
            k, v = (t.repeat_interleave(copies, dim=2) for t in (k, v))
        shared = k.shape[1] - q.shape[1]
        q = self._to_heads(q, lengths)  # [B, S of the place, N / degree, D]
        k, v = (self._keys_to_heads(t, lengths, shared) for t in (k, v))
        seen: Mask = mask.of if self._ring.size == 1 else mask
        out = self._inner(q, k, v, seen, scale=scale)
        return self._to_rows(out, lengths)

    def _keys_to_heads(self, x: Tensor, lengths: Sequence[int], shared: int) -> Tensor:
        if not shared:
            return self._to_heads(x, lengths)
        heads = x.shape[2] // self._group.size
        mine = slice(self._group.index * heads, (self._group.index + 1) * heads)
        return torch.cat([x[:, :shared, mine], self._to_heads(x[:, shared:], lengths)], dim=1)

    def _to_heads(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """[B, S of this rank, N, D] -> [B, sum of lengths, N / degree, D]."""
        degree = self._group.size
        if degree == 1:
            return x
        batch, rows, heads, dim = x.shape
        each = batch * heads // degree * dim
        apart = x.reshape(batch, rows, degree, heads // degree, dim)
        parts = apart.permute(2, 1, 0, 3, 4).contiguous()  # [degree, S, B, N / degree, D]
        sent = self._group.exchange(
            parts.view(degree * rows, each), [rows] * degree, list(lengths)
        )  # [sum of lengths, B * N/degree * D]
        return sent.view(-1, batch, heads // degree, dim).transpose(0, 1)

    def _to_rows(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """[B, sum of lengths, N / degree, D] -> [B, S of this rank, N, D]."""
        degree = self._group.size
        if degree == 1:
            return x
        batch, _, heads, dim = x.shape
        rows = lengths[self._group.index]
        sent = x.transpose(0, 1).reshape(-1, batch * heads * dim)  # [sum of lengths, B * N/degree * D]
        parts = self._group.exchange(sent, list(lengths), [rows] * degree)
        back = parts.view(degree, rows, batch, heads, dim).permute(
            2, 1, 0, 3, 4
        )  # [B, S, degree, N/degree, D]
        return back.reshape(batch, rows, degree * heads, dim)


class RingAttention:
    """Attention over keys and values that go around, one place's rows at a time.

    What each turn gives is merged by its log-sum-exp in float32, which is the softmax over all keys, exactly.
    Shared keys stand in front of every place's own and are attended once, in the first turn.
    """

    def __init__(self, group: Group, ulysses: int, attend: AttendWithLse) -> None:
        self._group = group
        self._ulysses = ulysses
        self._attend = attend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
        """q [B, S of this place, N, D], k and v [B, P + S of this place, Nkv, D] -> as q."""
        assert isinstance(mask, Part)
        degree, here = self._group.size, self._group.index
        lengths = [
            sum(mask.lengths[place * self._ulysses : (place + 1) * self._ulysses]) for place in range(degree)
        ]
        shared = k.shape[1] - q.shape[1]
        own = (k[:, shared:].contiguous(), v[:, shared:].contiguous())
        merged: _Merged | None = None
        turning = own
        for turn in range(degree):
            owner = (here - turn) % degree
            coming = (owner - 1) % degree
            shape = own[0].shape[0], lengths[coming], *own[0].shape[2:]
            arriving = own[0].new_empty(shape), own[1].new_empty(shape)
            handover = self._group.pass_on(turning, arriving) if turn < degree - 1 else None
            keys, values = (k, v) if turn == 0 else turning
            part = self._attend(
                q, keys, values, _keys_of(mask.of, lengths, owner, shared, first=turn == 0), scale=scale
            )
            merged = _Merged(*part) if merged is None else merged.with_more(*part)
            if handover is not None:
                handover.wait()
                turning = arriving
        assert merged is not None
        return merged.out.to(q.dtype)


class _Merged:
    """Attention over some of the keys: out float32 [B, S, N, D], lse float32 [B, N, S]."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out = out.float()
        self.lse = lse

    def with_more(self, out: Tensor, lse: Tensor) -> _Merged:
        both = torch.logaddexp(self.lse, lse)
        seen = both > float("-inf")  # a row that has seen nothing yet has no weights to share out
        old, new = (torch.where(seen, (part - both).exp(), 0.0) for part in (self.lse, lse))
        old, new = (weight.transpose(1, 2)[..., None] for weight in (old, new))  # [B, S, N, 1]
        return _Merged(self.out * old + out.float() * new, both)


def _keys_of(mask: Mask, lengths: Sequence[int], owner: int, shared: int, *, first: bool) -> Mask:
    """The mask between this place's rows and the keys of one turn; the first turn has the shared ones too."""
    match mask:
        case NoMask():
            return mask
        case KeyPadding(keep=keep):
            start = shared + sum(lengths[:owner])
            theirs = keep[:, start : start + lengths[owner]]
            return KeyPadding(torch.cat([keep[:, :shared], theirs], dim=1) if first else theirs)
        case _:
            raise AssertionError(f"the plan refuses a ring with a {mask.kind} mask")
