"""Batches: which pictures may be denoised side by side without one bit of any of them changing.

Kernels add in an order that depends on the shapes of their inputs, on threads and on the device, and not on
the numbers. So drawings on random numbers decide for all that follow: the blocks run once over a batch and
once over each of its pictures, and every bit must be the same. Only the blocks see a batch at all; the rest
of a step is done for each picture alone (`sampling.predict`).

What could make such a drawing blind, and what is done about it:

- Rounding that hides another order of sums. In float32 most sums show it. In bfloat16 one hidden value in
  some 2^18 did (three blocks of 64 channels, 7 rows), so pictures stay apart until `LEAST_VALUES` were
  compared: enough to see it where one row of a hundred is added in another order. A request waits for as
  many drawings as take a third of the time of its own steps, and is drawn one at a time until they are
  enough; large pictures need one.
- Pictures that are alike. Rows are drawn anew for each, and what the blocks are told beside them (positions,
  modulation) is turned by another distance for each, so what a kernel takes from the wrong picture shows.
- Another way of calling the blocks. They run as in a request: offloaded or not, over the same ranks, captured
  or eager, which backends must make equal to the bit. The number of threads counts as part of the shape.
- Ranks that decide differently. They agree on each drawing and on what it showed.
- Kernels whose shapes depend on the numbers. A mixture of experts is one, and a plan refuses it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from portable_dit.masks import Mask
from portable_dit.sampling import BlockRunner, Embedded, run_each, run_together
from portable_dit.trees import mapped, shape_of

if TYPE_CHECKING:
    from portable_dit.models.spec import Denoiser
    from portable_dit.parallel.mesh import Mesh

# Hidden values of one picture, over all blocks, of which none may differ; by the rounding that hides some.
LEAST_VALUES = {torch.float32: 1 << 10, torch.float16: 1 << 23, torch.bfloat16: 1 << 26}
MOST_DRAWINGS = 512  # of a shape; one that needs more is never drawn as a batch
FIRST_PAUSE, LONGEST_PAUSE = 8, 1024  # batches that are drawn apart after memory was short for one
MOST_KNOWN = 256  # shapes that are remembered, each with a few hundred bytes
ANOTHER = "another rank objects"


@dataclass(frozen=True)
class _Known:
    """So many drawings of those that are needed gave equal bits.

    objection: why that is over. pause: for how many batches, None = for good; left: of them, so many.
    """

    done: int = 0
    needed: int = 1
    objection: str | None = None
    pause: int | None = None
    left: int = 0

    @property
    def is_open(self) -> bool:
        return self.objection is None and self.done < self.needed


class Batches:
    """What is known of the shapes of one loaded model.

    A shape is whatever pictures have in common that decides the shapes of their rows and of what the blocks
    are told beside them. Ranks that share a model must ask the same at the same time.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        self._mesh = mesh
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()

    def is_open(self, shape: Hashable, count: int) -> bool:
        """Whether a further drawing would tell more of so many pictures of a shape."""
        return not self._agreed(not self._of(shape, count).is_open)

    def objection(self, shape: Hashable, count: int) -> str | None:
        """Why so many pictures of a shape must not go through the blocks side by side; None when they may.

        An objection that is not for good is one batch nearer to its end each time that it is asked for.
        """
        known, objection = self._of(shape, count), None
        if known.objection is not None and known.pause is not None:
            left = known.left - 1
            told = known.objection if left else None
            self._keep(shape, count, replace(known, left=left, objection=told))
        if known.is_open:
            progress = f"{known.done} of {known.needed} comparisons are done that show"
            objection = f"{progress} whether {count} at once come out the same"
        objection = known.objection or objection
        return None if self._agreed(objection is None) else objection or ANOTHER

    def compare(
        self,
        shape: Hashable,
        denoisers: Sequence[Denoiser],
        embedded: Sequence[Embedded],
        run: BlockRunner,
    ) -> None:
        """Makes one drawing of these pictures, whose numbers do not count. run: how the blocks are called."""
        count, rows = len(embedded), embedded[0][0]
        needed = -(-LEAST_VALUES[rows.dtype] // (rows.numel() * len(denoisers[0].blocks)))
        done = self._of(shape, count).done
        objection = None
        if len({shape_of(own) for own in embedded}) > 1:
            objection = "their rows are not alike"
        elif needed > MOST_DRAWINGS:
            few = f"so few numbers in {str(rows.dtype).removeprefix('torch.')}"
            objection = f"{few} do not show whether {count} at once come out the same"
        if not self._agreed(objection is None):  # ranks of other guidance branches have other rows
            self.refuse(shape, count, objection or ANOTHER)
        elif self._agreed(_bits_are_kept(done, denoisers, embedded, run)):
            self._keep(shape, count, _Known(done + 1, needed))
        else:
            self.refuse(shape, count, f"{count} at once came out otherwise here")

    def refuse(self, shape: Hashable, count: int, objection: str) -> None:
        """So many pictures of a shape are not to be drawn side by side any more."""
        self._keep(shape, count, _Known(objection=objection))

    def pause(self, shape: Hashable, count: int, objection: str) -> None:
        """So many pictures of a shape are not drawn side by side for a while, twice as long each time.

        For what passes, such as memory that others hold. Of one rank's own, so not where ranks share a model.
        """
        known = self._of(shape, count)
        pause = min(2 * known.pause, LONGEST_PAUSE) if known.pause else FIRST_PAUSE
        self._keep(shape, count, replace(known, objection=objection, pause=pause, left=pause))

    def _of(self, shape: Hashable, count: int) -> _Known:
        key = shape, count, torch.get_num_threads()
        if key not in self._known:
            return _Known()
        self._known.move_to_end(key)
        return self._known[key]

    def _keep(self, shape: Hashable, count: int, known: _Known) -> None:
        self._known[shape, count, torch.get_num_threads()] = known
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)  # the one that was not asked for longest

    def _agreed(self, here: bool) -> bool:
        return here if self._mesh is None else self._mesh.all(here)


def _bits_are_kept(
    drawing: int, denoisers: Sequence[Denoiser], embedded: Sequence[Embedded], run: BlockRunner
) -> bool:
    """What one drawing shows."""
    count = len(embedded)
    made_up = [_made_up(own, drawing * count + place, place / count) for place, own in enumerate(embedded)]
    together = run_together(denoisers, made_up, run)
    alone = run_each(denoisers, made_up, run)
    return all(one.equal(other) for one, other in zip(together, alone, strict=True))


def _made_up(own: Embedded, seed: int, turn: float) -> Embedded:
    """Random rows in the shape of a picture's, the same on every rank, and its arguments turned by a share of
    their length: what were valid places in a table stay so. Masks, which are the same for all, are left.
    """
    hidden, arguments = own
    rows = torch.randn(hidden.shape, generator=torch.Generator("cpu").manual_seed(seed))

    def turned(tensor: Tensor) -> Tensor:
        return tensor.flatten().roll(int(turn * tensor.numel())).view(tensor.shape)

    told = tuple(own if isinstance(own, Mask) else mapped(own, turned) for own in arguments)
    return rows.to(hidden.device, hidden.dtype), told
