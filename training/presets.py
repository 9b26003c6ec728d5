"""The ways to run the chain: sizes, shares of the time, how often to look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from portable_dit.models.h3_image.config import H3Config
from training import dit
from training.distil import DistilSettings
from training.dit import DiTSettings
from training.loop import LoopSettings
from training.model import mini_config, tiny_config
from training.vae import VAESettings

STAGES = ("vae", "dit256", "mixed", "distil", "eval")


@dataclass(frozen=True)
class Preset:
    """One way to run the chain.

    minutes: relative shares of the time; fixed_seconds: instead, for smoke runs. stages: what runs unless
    the command line says otherwise.
    """

    config: H3Config = field(default_factory=mini_config)
    vae: VAESettings = field(default_factory=VAESettings)
    dit: DiTSettings = field(default_factory=DiTSettings)
    distil: DistilSettings = field(default_factory=DistilSettings)
    minutes: Mapping[str, float] = field(
        default_factory=lambda: {"vae": 6, "dit256": 8, "mixed": 6, "distil": 3, "eval": 1.5}
    )
    stages: tuple[str, ...] = STAGES
    fixed_seconds: float | None = None
    limit_steps: int | None = None
    compile: bool = True
    graphs: bool = True
    precompile: bool = True
    in_process: bool = False
    toy: bool = False
    judge_minutes: float = 1.5
    encoder_tiles: int = 128
    scenes_chunk: int = 256
    cases: int = 16  # of each kind in evaluations on the way
    final_cases: int = 64
    sizes: tuple[int, int] = (256, 512)


def full() -> Preset:
    return Preset()


def further() -> Preset:
    """A run that starts from trained weights: the VAE is fixed, all sizes train at once, then distillation.

    The rate falls almost from the start: in the first run most of the gain came while it fell. Looking at
    results stops every GPU, so it happens seldom.
    """
    preset = Preset()
    mixed = LoopSettings(warmup=200, decay_from=0.15, floor=0.01, first_eval_seconds=150, eval_seconds=420)
    straight = replace(preset.distil.loop, decay_from=0.3, first_eval_seconds=1e6)
    return replace(
        preset,
        dit=replace(preset.dit, mixed_loop=mixed),
        distil=replace(preset.distil, loop=straight),
        stages=("mixed", "distil", "eval"),
        minutes={**preset.minutes, "mixed": 18.5, "distil": 5.5, "eval": 1.4},
    )


def smoke() -> Preset:
    """Real sizes, a few seconds a stage: proves graphs, compilation and memory before the long run."""
    preset = Preset()
    loop = LoopSettings(log_seconds=3, save_seconds=8, eval_seconds=60, first_eval_seconds=6, warmup=50)
    small = tuple(replace(b, first_fill=1024) for b in preset.dit.small)
    large = tuple(replace(b, first_fill=128) for b in preset.dit.large)
    return replace(
        preset,
        vae=replace(preset.vae, loop=loop, first_fill=1024),
        dit=replace(preset.dit, small_loop=loop, mixed_loop=loop, small=small, large=large),
        distil=replace(preset.distil, loop=loop),
        fixed_seconds=10,
        judge_minutes=0.2,
        cases=4,
        final_cases=4,
    )


def tiny() -> Preset:
    """A toy model on toy data, for a CPU."""
    loop = LoopSettings(log_seconds=2, save_seconds=4, eval_seconds=1000, first_eval_seconds=1000, warmup=2)
    small = tuple(replace(b, batch=4, pool=32, first_fill=8, chunk=4) for b in dit.small_buckets())
    large = tuple(replace(b, batch=2, pool=8, first_fill=2, chunk=2) for b in dit.large_buckets())
    return Preset(
        config=tiny_config(),
        vae=replace(VAESettings(), batch=2, pool=32, first_fill=16, eval_images=4, stat_images=8, loop=loop),
        dit=replace(DiTSettings(), small_loop=loop, mixed_loop=loop, small=small, large=large),
        distil=replace(DistilSettings(), loop=loop, substeps=2),
        fixed_seconds=60,
        limit_steps=6,
        compile=False,
        graphs=False,
        in_process=True,
        toy=True,
        judge_minutes=0.0,
        encoder_tiles=8,
        scenes_chunk=8,
        cases=2,
        final_cases=2,
        sizes=(256, 256),
    )
