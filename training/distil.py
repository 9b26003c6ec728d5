"""Stage 4: six steps without guidance, one output head for each (after PDD, arXiv 2607.26004).

Time is cut into the six windows of the shifted grid. For real data noised to the start of a random window,
the teacher (the running average, with guidance) walks through the window in small Euler steps; the student
(the same trunk with one head for each window, no guidance) learns the straight velocity from the start to
where it arrived.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from portable_dit.models.h3_image.config import H3Config
from training.checkpoint import has_set, read_index, save_set
from training.dit import DiTSettings, Fillers, Pools, load_trained, masked_error, new_model
from training.loop import LoopSettings, Meter, Progress, TrainStep, run_loop
from training.model import Batch, H3Mini, is_muon_matrix, make_layout
from training.optim import FlatOptimizer, OptimSettings
from training.parallel import Clock, World
from training.sample import EDIT_GUIDANCE, TEXT_GUIDANCE, mix_references, shifted

log = logging.getLogger("training")

NAME = "student"


@dataclass(frozen=True)
class DistilSettings:
    """substeps: the teacher's Euler steps in one window."""

    substeps: int = 4
    optim: OptimSettings = field(
        default_factory=lambda: OptimSettings(muon_rate=7e-4, adam_rate=5e-4, ema_decay=0.995)
    )
    loop: LoopSettings = field(
        default_factory=lambda: LoopSettings(
            warmup=50, decay_from=0.4, first_eval_seconds=45, eval_seconds=60
        )
    )


@torch.no_grad()
def walk(
    teacher: H3Mini, batch: Batch, words: Tensor, references: Tensor, x: Tensor, start: Tensor, stop: Tensor,
    *, substeps: int, guidance: float,
) -> Tensor:  # fmt: skip
    """Mean velocity [B, P, 96] of the guided teacher from noise level `start` to `stop`, float32 [B]."""
    layout = make_layout(teacher, batch, batch.length)
    empty = make_layout(teacher, batch, torch.zeros_like(batch.length))
    width = (start - stop) / substeps
    total = torch.zeros_like(x)
    for i in range(substeps):
        times = 1 - (start - i * width)
        v = teacher.velocity(x, words, references, layout, times)
        v_empty = teacher.velocity(x, words, references, empty, times)
        v = v_empty + guidance * (v - v_empty)
        x = x + width[:, None, None] * v
        total = total + v
    return total / substeps


def distil_loss(
    student: H3Mini, teacher: H3Mini, batches: Mapping[str, Batch], levels: Tensor, settings: DistilSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """levels: float32 [windows + 1], 1 -> 0."""
    parts: dict[str, Tensor] = {}
    device = levels.device
    counts = [len(batch.ids) for batch in batches.values()]
    ids = torch.cat([batch.ids for batch in batches.values()])
    length = torch.cat([batch.length for batch in batches.values()])
    with student.autocast(device):
        words = student.word_rows(ids, length).split(counts)
        with torch.no_grad():
            teacher_words = teacher.word_rows(ids, length).split(counts)
    total = torch.zeros((), device=device)
    places = torch.arange(len(levels) - 1, device=device)
    for (name, batch), some, some_teacher in zip(batches.items(), words, teacher_words, strict=True):
        window = torch.randint(0, len(places), (len(batch.ids),), device=device)
        start, stop = levels[window], levels[window + 1]
        noise = torch.randn_like(batch.target)
        x = torch.lerp(batch.target, noise, start[:, None, None])
        references = mix_references(batch.references)
        layout = make_layout(student, batch, batch.length)
        guidance = EDIT_GUIDANCE if batch.references.shape[1] else TEXT_GUIDANCE
        with student.autocast(device):
            wanted = walk(
                teacher,
                batch,
                some_teacher,
                references,
                x,
                start,
                stop,
                substeps=settings.substeps,
                guidance=guidance,
            )
            heads = (window[:, None] == places[None]).float()
            v = student.velocity(x, some, references, layout, 1 - start, windows=heads)
        parts[name] = masked_error(v, wanted, layout.real)
        total = total + parts[name] * len(window)
    return total / sum(counts), parts


class DistilStage:
    """Teacher from the flow-matching set, student beside it."""

    def __init__(
        self, config: H3Config, settings: DistilSettings, *, table: Tensor, world: World, out: Path,
        compile_blocks: bool, use_graphs: bool, seed: int,
    ) -> None:  # fmt: skip
        self.config, self.settings, self.world, self.out = config, settings, world, out
        self.use_graphs = use_graphs
        device = world.device
        make = functools.partial(
            new_model, config, table, seed=seed, compile_blocks=compile_blocks, device=device
        )
        self.teacher, self.student = make(), make()
        load_trained(self.teacher, out)
        self.teacher.requires_grad_(False)
        self.before = 0
        if has_set(out, NAME) and not is_finished(out):
            self.before = load_trained(self.student, out, NAME)["step"]
        else:
            load_trained(self.student, out)
            with torch.no_grad():
                final = self.student.transformer.final_layer
                final.heads.weight.copy_(final.video_out.weight.expand_as(final.heads.weight))
                final.heads.bias.copy_(final.video_out.bias.expand_as(final.heads.bias))
        self.optimizer = FlatOptimizer(
            self.student.named_parameters(), is_matrix=is_muon_matrix, settings=settings.optim
        )
        self.levels = torch.tensor(shifted(config.dit.pdd_heads, config.scheduler.shift), device=device)
        torch.manual_seed(seed + 31 + world.rank)

    def save(self, progress: Progress, *, done: bool = False) -> None:
        note = {"done": done, "samples": progress.samples}
        save_set(self.out, NAME, self.optimizer.named_ema(), step=self.before + progress.steps, note=note)

    def run(
        self, programs: Sequence[Sequence[str]], pools: Sequence[Pools], make_clock: Callable[[], Clock],
        evaluate: Callable[[H3Mini, Progress], None],
    ) -> None:  # fmt: skip
        """Distil until the clock that it makes is done and leave the running average in the student."""
        owner = {name: p for p in pools for name in p.buckets}
        meter = Meter([name for program in programs for name in program], self.world.device)
        steps: list[TrainStep] = []
        for program in programs:
            source = owner[program[0]]
            loss = functools.partial(self._loss, source, tuple(program))
            steps.append(
                TrainStep(
                    loss,
                    drawn={name: source.buckets[name].batch for name in program},
                    optimizer=self.optimizer,
                    meter=meter,
                    world=self.world,
                    use_graphs=self.use_graphs,
                    memory=steps[0].pool if steps else None,
                )
            )

        def evaluate_average(progress: Progress) -> None:
            self.optimizer.swap_ema()
            try:
                evaluate(self.student, progress)
            finally:
                self.optimizer.swap_ema()

        fillers = Fillers([p.filler for p in pools])
        fillers.start()
        clock = make_clock()
        try:
            progress = run_loop(
                "distil",
                steps,
                optimizer=self.optimizer,
                meter=meter,
                filler=fillers,
                clock=clock,
                world=self.world,
                settings=self.settings.loop,
                save=self.save,
                evaluate=evaluate_average,
            )
        finally:
            fillers.stop()
        if self.world.is_first:
            self.save(progress, done=True)
        self.world.barrier()
        self.optimizer.swap_ema()

    def _loss(self, source: Pools, names: Sequence[str]) -> tuple[Tensor, Mapping[str, Tensor]]:
        return distil_loss(self.student, self.teacher, source.batches(names), self.levels, self.settings)


def is_finished(folder: Path) -> bool:
    return has_set(folder, NAME) and bool(read_index(folder, NAME)["note"].get("done"))


__all__ = ["NAME", "DiTSettings", "DistilSettings", "DistilStage", "distil_loss", "is_finished", "walk"]
