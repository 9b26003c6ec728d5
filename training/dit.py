"""Stages 2 and 3: the text layers and the transformer, by flow matching on pooled latents.

Each step accumulates over buckets (text to image, one reference, two or three), each of a fixed shape, and
alternates between programs: lists of buckets of one canvas class, 256 pixels or the larger canvases
together.

x_sigma = (1 - sigma) * data + sigma * noise; the model is fed t = 1 - sigma and predicts data - noise.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from portable_dit.models.h3_image.config import H3Config
from training.checkpoint import has_set, load_set, read_index, save_set
from training.feed import Feed, FeedKind
from training.loop import LoopSettings, Meter, Progress, TrainStep, run_loop
from training.model import Batch, H3Mini, is_muon_matrix, make_layout
from training.optim import FlatOptimizer, OptimSettings
from training.parallel import Clock, World
from training.pool import Encoder, Filler, LatentPool, Plan, as_batch, encode_chunk
from training.render import Atlas
from training.sample import mix_references

log = logging.getLogger("training")

NAME = "dit"
LARGE_SIZES = (
    (512, 512, 0.62),
    (384, 384, 0.08),
    (512, 384, 0.07),
    (384, 512, 0.07),
    (320, 512, 0.05),
    (512, 320, 0.05),
    (512, 256, 0.02),
    (640, 384, 0.02),
    (384, 640, 0.02),
)


@dataclass(frozen=True)
class Bucket:
    """Samples of one shape: batch per step, R reference slots, pictures of up to picture_rows rows."""

    name: str
    references: int
    picture_rows: int
    batch: int
    pool: int
    first_fill: int
    chunk: int
    reuse: float
    sizes: tuple[tuple[int, int, float], ...]
    workers: int = 1

    def feed_kind(self) -> FeedKind:
        return FeedKind(self.name, self.references, self.sizes, self.chunk, self.workers)


def small_buckets() -> tuple[Bucket, ...]:
    """256 px: 64 rows a picture."""
    sizes = ((256, 256, 1.0),)
    return (
        Bucket("256-text", 0, 64, 160, 49152, 16384, 256, 32.0, sizes),
        Bucket("256-one", 1, 64, 272, 65536, 12288, 256, 32.0, sizes),
        Bucket("256-more", 3, 64, 80, 24576, 4096, 128, 32.0, sizes),
    )


def large_buckets() -> tuple[Bucket, ...]:
    """Canvases of up to 256 rows, all sizes in one batch."""
    return (
        Bucket("512-text", 0, 256, 88, 16384, 3072, 64, 48.0, LARGE_SIZES),
        Bucket("512-one", 1, 256, 104, 20480, 2560, 64, 48.0, LARGE_SIZES),
        Bucket("512-more", 3, 256, 16, 6144, 512, 32, 48.0, LARGE_SIZES),
    )


@dataclass(frozen=True)
class DiTSettings:
    """Loss, optimiser and buckets.

    drop_text: share of samples without prompt. uniform: share of sigmas that are uniform, the rest are
    logit-normal, moved by `shift` towards noise at 64 rows a picture and by more at more: that is where it
    is decided what to draw, and the same noise hides less of a larger picture.
    """

    drop_text: float = 0.1
    uniform: float = 0.15
    shift: float = 3.0
    shift_growth: float = 0.25  # power of the number of rows
    optim: OptimSettings = field(default_factory=OptimSettings)
    small_loop: LoopSettings = field(default_factory=lambda: LoopSettings(decay_from=0.8, floor=0.5))
    mixed_loop: LoopSettings = field(default_factory=lambda: LoopSettings(decay_from=0.4, floor=0.01))
    small: tuple[Bucket, ...] = field(default_factory=small_buckets)
    large: tuple[Bucket, ...] = field(default_factory=large_buckets)


def draw_sigmas(count: int, settings: DiTSettings, device: torch.device, *, rows: int) -> Tensor:
    """Noise levels float32 [count] in 0..1 for pictures of up to `rows` rows."""
    shift = settings.shift * (rows / 64) ** settings.shift_growth
    u = torch.sigmoid(torch.randn(count, device=device))
    even = torch.rand(count, device=device)
    u = torch.where(torch.rand(count, device=device) < settings.uniform, even, u)
    return shift * u / (1 + (shift - 1) * u)


def masked_error(out: Tensor, wanted: Tensor, real: Tensor) -> Tensor:
    """Mean square over the real rows of each sample, mean over samples; [B, P, 96] and bool [B, P]."""
    error = (out - wanted).square().mean(dim=2)  # [B, P]
    return ((error * real).sum(dim=1) / real.sum(dim=1)).mean()


def flow_loss(
    model: H3Mini, batches: Mapping[str, Batch], settings: DiTSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Flow-matching loss over some buckets, each sample counted alike.

    Prompts of all buckets are encoded at once.
    """
    parts: dict[str, Tensor] = {}
    device = next(iter(batches.values())).ids.device
    counts = [len(batch.ids) for batch in batches.values()]
    length = torch.cat([batch.length for batch in batches.values()])
    length = length * (torch.rand(len(length), device=device) >= settings.drop_text)
    with model.autocast(device):
        words = model.word_rows(torch.cat([batch.ids for batch in batches.values()]), length)
    total = length.new_zeros((), dtype=torch.float32)
    for (name, batch), some, shown in zip(
        batches.items(), words.split(counts), length.split(counts), strict=True
    ):
        sigma = draw_sigmas(len(shown), settings, device, rows=batch.target.shape[1])
        noise = torch.randn_like(batch.target)
        noisy = torch.lerp(batch.target, noise, sigma[:, None, None])
        layout = make_layout(model, batch, shown)
        with model.autocast(device):
            v = model.velocity(noisy, some, mix_references(batch.references), layout, 1 - sigma)
        parts[name] = masked_error(v, batch.target - noise, layout.real)
        total = total + parts[name] * len(shown)
    return total / sum(counts), parts


class Pools:
    """The latent pools of some buckets with the encoder that fills them."""

    def __init__(
        self, buckets: Sequence[Bucket], *, encoder: Encoder, atlas: Atlas, feed: Feed, row_size: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.buckets = {bucket.name: bucket for bucket in buckets}
        self.pools = {
            b.name: LatentPool(
                b.pool, references=b.references, picture_rows=b.picture_rows, row_size=row_size, device=device
            )
            for b in buckets
        }
        plans = [
            Plan(
                b.name,
                b.name,
                functools.partial(encode_chunk, atlas=atlas, encoder=encoder, picture_rows=b.picture_rows),
                b.reuse,
            )
            for b in buckets
        ]
        self.filler = Filler(self.pools, plans, feed, device=device)
        self.filler.fill({b.name: b.first_fill for b in buckets})

    def batches(self, names: Sequence[str]) -> dict[str, Batch]:
        return {name: self.pools[name].batch(self.buckets[name].batch) for name in names}


def random_batch(bucket: Bucket, *, row_size: int, device: torch.device) -> Batch:
    """A batch of the bucket's shape without data, for compiling ahead of time."""
    n, rows = bucket.batch, bucket.picture_rows
    whole = {"device": device, "dtype": torch.int64}
    side = int(rows**0.5)
    return as_batch(
        {
            "ids": torch.ones(n, 32, **whole),
            "length": torch.full((n,), 8, **whole),
            "grid": torch.full((n, 2), side, **whole),
            "num_references": torch.full((n,), bucket.references, **whole),
            "target": torch.randn(n, rows, row_size, device=device),
            "references": torch.randn(n, bucket.references, rows, row_size, device=device),
        }
    )


def new_model(
    config: H3Config, table: Tensor, *, seed: int, compile_blocks: bool, device: torch.device
) -> H3Mini:
    """A model with fresh weights on the device."""
    model = H3Mini(config, use_compiler=compile_blocks)
    model.start(table, seed=seed)
    return model.to(device)


def load_trained(model: H3Mini, folder: Path, name: str = NAME) -> dict[str, Any]:
    """Put a saved set into the model; returns the set's index. The frozen word table is not part of sets."""
    tensors, index = load_set(folder, name)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    missing = [key for key in missing if not key.endswith("embed_tokens.weight")]
    if missing or unexpected:
        raise ValueError(
            f"{folder}/{name}: missing {missing[:3]}, unexpected {unexpected[:3]}; another model's set?"
        )
    return index


class DiTStage:
    """Model, optimiser and running average of the flow-matching stages."""

    def __init__(
        self, config: H3Config, settings: DiTSettings, *, table: Tensor, world: World, out: Path,
        compile_blocks: bool, use_graphs: bool, seed: int,
    ) -> None:  # fmt: skip
        self.config, self.settings, self.world, self.out = config, settings, world, out
        self.use_graphs = use_graphs
        device = world.device
        self.model = new_model(config, table, seed=seed, compile_blocks=compile_blocks, device=device)
        self.before = {"step": 0, "samples": 0}
        if has_set(out, NAME):
            index = load_trained(self.model, out)
            self.before = {"step": index["step"], "samples": index["note"]["samples"]}
            log.info("dit: continues from %s", self.before)
        self.optimizer = FlatOptimizer(
            self.model.named_parameters(), is_matrix=is_muon_matrix, settings=settings.optim
        )
        world.broadcast(self.optimizer.weight)
        self.optimizer.restart_ema()
        torch.manual_seed(seed + 17 + world.rank)

    def save(self, progress: Progress, *, stage: str, done: bool = False) -> None:
        note = {"stage": stage, "done": done, "samples": self.before["samples"] + progress.samples}
        step = self.before["step"] + progress.steps
        save_set(self.out, NAME, self.optimizer.named_ema(), step=step, note=note)

    def run(
        self, stage: str, programs: Sequence[Sequence[str]], pools: Sequence[Pools],
        make_clock: Callable[[], Clock],
        loop: LoopSettings, evaluate: Callable[[H3Mini, Progress], None],
    ) -> None:  # fmt: skip
        """Train on the programs in turn until the clock that it makes is done.

        programs: bucket names; pools: where they are.
        """
        owner = {name: p for p in pools for name in p.buckets}
        meter = Meter([name for program in programs for name in program], self.world.device)
        steps: list[TrainStep] = []
        for program in programs:
            source = owner[program[0]]
            steps.append(
                TrainStep(
                    functools.partial(self._loss, source, tuple(program)),
                    drawn={name: source.buckets[name].batch for name in program},
                    optimizer=self.optimizer,
                    meter=meter,
                    world=self.world,
                    use_graphs=self.use_graphs,
                    memory=steps[0].pool if steps else None,
                )
            )
        fillers = Fillers([p.filler for p in pools])

        def evaluate_average(progress: Progress) -> None:
            self.optimizer.swap_ema()
            try:
                evaluate(self.model, progress)
            finally:
                self.optimizer.swap_ema()

        fillers.start()
        clock = make_clock()
        try:
            progress = run_loop(
                stage,
                steps,
                optimizer=self.optimizer,
                meter=meter,
                filler=fillers,
                clock=clock,
                world=self.world,
                settings=loop,
                save=functools.partial(self.save, stage=stage),
                evaluate=evaluate_average,
            )
        finally:
            fillers.stop()
        if self.world.is_first:
            self.save(progress, stage=stage, done=True)
        self.before["step"] += progress.steps
        self.before["samples"] += progress.samples
        self.world.barrier()

    def _loss(self, source: Pools, names: Sequence[str]) -> tuple[Tensor, Mapping[str, Tensor]]:
        return flow_loss(self.model, source.batches(names), self.settings)


class Fillers:
    """Several fillers as one."""

    def __init__(self, fillers: Sequence[Filler]) -> None:
        self.fillers = fillers

    def start(self) -> None:
        for filler in self.fillers:
            filler.start()

    def between_steps(self, drawn: Mapping[str, int]) -> None:
        for filler in self.fillers:
            filler.between_steps({name: n for name, n in drawn.items() if name in filler.pools})

    def stop(self) -> None:
        for filler in self.fillers:
            filler.stop()


def is_finished(folder: Path, stage: str) -> bool:
    """Whether the saved set has been through this stage to its end."""
    if not has_set(folder, NAME):
        return False
    note = read_index(folder, NAME)["note"]
    order = ("dit256", "mixed")
    reached = order.index(note["stage"])
    return reached > order.index(stage) or (note["stage"] == stage and bool(note["done"]))
