"""One process per GPU: rank, gradient sum, and a clock that all ranks agree on.

With one process nothing of torch.distributed is touched.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """The processes of one run. rank 0 writes files, logs and evaluates."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @staticmethod
    def start() -> World:
        """From the variables that torchrun sets (RANK, WORLD_SIZE); one process without them.

        Every process sees one GPU, the first of its own (`training.run_all` sees to it).
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        rank = int(os.environ.get("RANK", "0"))
        device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if size > 1:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return World(rank, size, device)

    def mean(self, tensor: Tensor) -> None:
        """Mean over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
            tensor.div_(self.size)

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values everywhere, in place."""
        if self.size > 1:
            dist.broadcast(tensor, 0)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def stop(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


class Clock:
    """The share of a stage's time that is used up, the same on every rank.

    Everything counts: set-up, evaluation, checkpoints. limit_steps ends a stage early, for tests. tick()
    once per step; it is a host clock, so throttle the device.
    """

    def __init__(
        self, world: World, *, seconds: float, limit_steps: int | None = None, every: int = 8
    ) -> None:
        self.world, self.seconds, self.limit_steps, self.every = world, seconds, limit_steps, every
        self.start = time.monotonic()
        self.steps = 0
        self.fraction = 0.0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    @property
    def done(self) -> bool:
        return self.fraction >= 1.0

    def tick(self) -> float:
        """Count a step; returns the share used, 0 to 1."""
        self.steps += 1
        if self.steps % self.every == 0 or self.world.size == 1:
            value = self.elapsed / self.seconds
            if self.limit_steps is not None:
                value = max(value, self.steps / self.limit_steps)
            if self.world.size > 1:
                shared = torch.tensor(value, device=self.world.device)
                self.world.broadcast(shared)
                value = float(shared)
            self.fraction = min(value, 1.0)
        return self.fraction


def warm_and_decay(
    step: int, fraction: float, *, warmup: int, decay_from: float, floor: float = 0.0
) -> float:
    """Learning-rate scale of a step.

    Linear over the first `warmup` steps, flat, then linear to `floor` at fraction 1.
    """
    scale = min(1.0, (step + 1) / max(warmup, 1))
    if fraction > decay_from:
        scale *= floor + (1 - floor) * (1 - fraction) / (1 - decay_from)
    return scale
