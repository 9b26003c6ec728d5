"""The loop that every stage shares: captured steps under a wall clock, logged, saved and evaluated."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from training.capture import Captured, Throttle
from training.optim import FlatOptimizer
from training.parallel import Clock, World, warm_and_decay
from training.pool import Filler

log = logging.getLogger("training")

MAX_SKIPPED = 50  # non-finite gradients between two log lines before the last good weights come back
MAX_RESTORES = 3


@dataclass(frozen=True)
class LoopSettings:
    """Seconds between log lines, saves and evaluations, and the shape of the learning rate.

    warmup: steps. decay_from: used share of the time at which the rate starts to fall, to `floor` at the end.
    """

    log_seconds: float = 5.0
    save_seconds: float = 60.0
    eval_seconds: float = 90.0
    first_eval_seconds: float = 30.0
    warmup: int = 100
    decay_from: float = 0.6
    floor: float = 0.02


class Meter:
    """Running sums of named losses on the device, read only at a log line."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self.sums = torch.zeros(len(names), device=device)
        self.counts = torch.zeros(len(names), device=device)

    @torch.no_grad()
    def add(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            i = self.names.index(name)
            self.sums[i].add_(value.detach().float())
            self.counts[i].add_(1.0)

    def read(self) -> dict[str, float]:
        """Means since the last reading; a host synchronisation."""
        sums, counts = self.sums.tolist(), self.counts.tolist()
        self.sums.zero_()
        self.counts.zero_()
        return {n: s / c for n, s, c in zip(self.names, sums, counts, strict=True) if c}


class TrainStep:
    """Forward, backward, gradient mean over the ranks, update.

    With one process it is one CUDA graph; with several, two graphs around the all-reduce.
    loss: draws a batch, returns (total, parts for the meter). drawn: samples taken from each pool per step.
    """

    def __init__(
        self,
        loss: Callable[[], tuple[Tensor, Mapping[str, Tensor]]],
        *,
        drawn: Mapping[str, int],
        optimizer: FlatOptimizer,
        meter: Meter,
        world: World,
        use_graphs: bool,
        memory: Any = None,
    ) -> None:
        self.drawn = dict(drawn)
        self.optimizer, self.world = optimizer, world
        before = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}

        def undo() -> None:
            optimizer.load_state_dict(before)
            optimizer.skipped.zero_()
            meter.read()

        def accumulate() -> None:
            optimizer.zero_grad()
            total, parts = loss()
            total.backward()
            meter.add(parts)

        def everything() -> None:
            accumulate()
            optimizer.step()

        options = {"device": world.device, "enabled": use_graphs, "undo": undo}
        begin = time.monotonic()
        if world.size == 1:
            self.graphs = [Captured(everything, pool=memory, **options)]
        else:
            first = Captured(accumulate, pool=memory, **options)
            self.graphs = [first, Captured(optimizer.step, pool=first.pool, **options)]
        self.pool = self.graphs[0].pool
        gib = torch.cuda.max_memory_reserved() / 2**30 if world.device.type == "cuda" else 0.0
        names = "+".join(self.drawn)
        log.info("step for %s ready in %.1f s, %.1f GiB reserved", names, time.monotonic() - begin, gib)

    @property
    def samples(self) -> int:
        return sum(self.drawn.values()) * self.world.size

    def __call__(self) -> None:
        self.graphs[0]()
        if self.world.size > 1:
            self.world.mean(self.optimizer.grad)
            self.graphs[1]()


@dataclass
class Progress:
    """Where a stage stands: for logs and for the notes in saved sets."""

    steps: int = 0
    samples: int = 0
    restores: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


def run_loop(
    stage: str,
    steps: Sequence[TrainStep],
    *,
    optimizer: FlatOptimizer,
    meter: Meter,
    filler: Filler,
    clock: Clock,
    world: World,
    settings: LoopSettings,
    save: Callable[[Progress], None],
    evaluate: Callable[[Progress], None],
) -> Progress:
    """Take the steps in turn until the clock is done. Only rank 0 saves and evaluates.

    Raises RuntimeError when the loss stays non-finite after restoring the last good weights.
    """
    progress = Progress()
    throttle = Throttle(world.device)
    good = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    slower = 1.0
    last_log = last_save = time.monotonic()
    next_eval = time.monotonic() + settings.first_eval_seconds
    logged_samples = 0
    while not clock.done:
        step = steps[progress.steps % len(steps)]
        rate = warm_and_decay(
            progress.steps,
            clock.fraction,
            warmup=settings.warmup,
            decay_from=settings.decay_from,
            floor=settings.floor,
        )
        optimizer.set_rate(rate * slower)
        step()
        filler.between_steps(step.drawn)
        throttle()
        progress.steps += 1
        progress.samples += step.samples
        clock.tick()
        now = time.monotonic()
        if now - last_log > settings.log_seconds or clock.done:
            skipped = int(optimizer.skipped)
            optimizer.skipped.zero_()
            line = meter.read() | {"grad": float(optimizer.grad_norm), "rate": rate, "skipped": skipped}
            speed = (progress.samples - logged_samples) / (now - last_log)
            _log_line(stage, progress, clock, line, speed)
            progress.history.append({"t": clock.elapsed, "samples": progress.samples} | line)
            logged_samples, last_log = progress.samples, time.monotonic()
            if skipped > MAX_SKIPPED or not bool(torch.isfinite(optimizer.weight).all()):
                progress.restores += 1
                if progress.restores > MAX_RESTORES:
                    raise RuntimeError(
                        f"{stage}: the loss is not finite after {MAX_RESTORES} restores; see the log."
                    )
                slower /= 2
                log.warning(
                    "%s: %d bad gradients, back to the last good weights at half the rate", stage, skipped
                )
                optimizer.load_state_dict(good)
            else:
                for name, tensor in optimizer.state_dict().items():
                    good[name].copy_(tensor)
        if not world.is_first:
            continue
        if now - last_save > settings.save_seconds:
            attempt(save, progress)
            last_save = time.monotonic()
        if now > next_eval and clock.fraction < 0.95:
            attempt(evaluate, progress)
            next_eval = time.monotonic() + settings.eval_seconds
    world.barrier()
    return progress


def attempt(work: Callable[[Progress], None], progress: Progress) -> None:
    """A look or a save that fails must not cost the run."""
    try:
        work(progress)
    except Exception:
        log.exception("training goes on without this")


def _log_line(stage: str, progress: Progress, clock: Clock, line: Mapping[str, float], speed: float) -> None:
    if not progress.steps:
        return
    values = "  ".join(f"{name} {value:.4g}" for name, value in line.items())
    log.info(
        "%s %5.1f s %3.0f%%  step %d  %.3f M  %.0f/s  %s",
        stage,
        clock.elapsed,
        100 * clock.fraction,
        progress.steps,
        progress.samples / 1e6,
        speed,
        values,
    )
