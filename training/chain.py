"""The whole training as one chain of stages under one wall clock; `training.run_all` is its command line.

Stages: vae (judge and ahead-of-time compilation run beside it), dit256, mixed, distil, eval. Every stage
continues from what it finds in the output folder, so a chain that died, or was given more time, is started
again as it was.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from portable_dit.evaluation.builtin.judge import Judge, load_judge
from portable_dit.models.h3_image.vae import ImageVAE
from training import distil, dit, vae
from training.captions import Tokenizer
from training.checkpoint import write_json
from training.distil import DistilStage
from training.dit import DiTStage, Pools, load_trained
from training.export import export
from training.feed import Feed, FeedKind
from training.gates import Report, against_smaller, evaluate, fixed_cases
from training.judge import save_judge
from training.loop import Progress
from training.model import H3Mini, load_float_table
from training.parallel import Clock, World
from training.pool import Encoder
from training.precompile import PARTS, prepare
from training.presets import STAGES, Preset
from training.render import Atlas, render
from training.sample import Painter, distilled, sheet
from training.scenes import EDIT_MIX, THREE_MIX, TWO_MIX, Concepts
from training.tiny import make_toy_data, toy_atlas
from training.vae import VAEStage, load_vae, psnr

log = logging.getLogger("training")


class Chain:
    """State shared by the stages of one process. again: train finished stages further."""

    def __init__(
        self, preset: Preset, *, out: Path, data: Path, minutes: float, seed: int, again: bool = False
    ) -> None:
        self.world = World.start()
        self.device = self.world.device
        self.preset, self.out, self.seed, self.again = preset, out, seed, again
        self.deadline = time.monotonic() + 60 * minutes
        out.mkdir(parents=True, exist_ok=True)
        if preset.toy:
            data = out / "toy-data"
            if self.world.is_first:
                make_toy_data(data, table_dim=preset.config.text.table_dim)
            self.world.barrier()
        self.data = data
        self.judge_path = out / "judge.safetensors"
        prepare(self.device)
        self.concepts = Concepts.load(data / "concepts.json")
        self.tokenizer = Tokenizer(data / "vocab.txt")
        self.table = load_float_table(load_file(data / "text_table.safetensors"))
        text = replace(preset.config.text, vocab_size=len(self.table))
        self.config = replace(preset.config, text=text)
        self.atlas = toy_atlas(len(self.concepts)) if preset.toy else Atlas.load(data, device=self.device)
        self.feed = self._start_feed()
        self.stages: tuple[str, ...] = STAGES
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.judge: Judge | None = None
        self.encoder_owner: ImageVAE | None = None
        self.small: Pools | None = None
        self.large: Pools | None = None

    def _start_feed(self) -> Feed:
        buckets = (*self.preset.dit.small, *self.preset.dit.large)
        # The encoder is checked on scenes-256, so that one is always there.
        kinds: list[FeedKind] = vae.feed_kinds(self.preset.scenes_chunk) + [b.feed_kind() for b in buckets]
        return Feed(
            kinds, self.data, seed=self.seed + 100_003 * self.world.rank, in_process=self.preset.in_process
        )

    def clock_for(self, stage: str) -> Callable[[], Clock]:
        """A clock that starts when the loop starts and ends with the stage's share of what is left now."""
        preset = self.preset
        if preset.fixed_seconds is not None:
            return lambda: Clock(
                self.world, seconds=preset.fixed_seconds or 1.0, limit_steps=preset.limit_steps
            )
        shares = [preset.minutes[s] for s in self.stages[self.stages.index(stage) :]]
        left = max(self.deadline - time.monotonic(), 30.0)
        until = time.monotonic() + left * shares[0] / sum(shares)
        log.info("%s: %.0f s of %.0f s", stage, until - time.monotonic(), left)
        return lambda: Clock(self.world, seconds=max(until - time.monotonic(), 10.0))

    def start_children(self) -> None:
        """The judge and the compiler, as processes beside the VAE stage or the filling of the pools.

        One process compiles one part, all at once: a machine has more cores than one compilation uses.
        """
        if not self.world.is_first:
            return
        if self.preset.toy:
            save_judge(Judge(len(self.concepts)).eval(), self.judge_path)
        elif not self.judge_path.exists():
            command = ["-m", "training.judge", "--data", str(self.data), "--out", str(self.judge_path)]
            self._child("judge", [*command, "--minutes", str(self.preset.judge_minutes)])
        if self.preset.compile and self.preset.precompile and self.device.type == "cuda":
            places = ["--out", str(self.out), "--data", str(self.data)]
            for part in PARTS:
                self._child(f"precompile-{part}", ["-m", "training.run_all", "--precompile", part, *places])

    def _child(self, name: str, arguments: Sequence[str]) -> None:
        with (self.out / f"{name}.log").open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, *arguments], stdout=output, stderr=subprocess.STDOUT, env=alone()
            )
        self.children[name] = child

    def wait_for_children(self, names: Sequence[str], *, seconds: float) -> None:
        """Let some children finish, on every rank; a failed one is told and lived without."""
        until = time.monotonic() + seconds
        for name in names:
            child = self.children.pop(name, None)
            if child is None:
                continue
            try:
                code = child.wait(timeout=max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                child.kill()
                code = None
            if code != 0:
                log.warning("%s ended with %s, see %s.log", name, code, name)
            else:
                log.info("%s is done", name)
        self.world.barrier()

    # The stages.

    def run_vae(self) -> None:
        if vae.is_finished(self.out) and not self.again:
            log.info("vae: already finished")
            return
        stage = VAEStage(
            self.config.vae,
            self.preset.vae,
            atlas=self.atlas,
            feed=self.feed,
            world=self.world,
            out=self.out,
            compile_blocks=self.preset.compile,
            use_graphs=self.preset.graphs,
            seed=self.seed,
        )
        stage.run(self.clock_for("vae"))

    def finished_vae(self) -> ImageVAE:
        if self.encoder_owner is None:
            self.world.barrier()
            self.encoder_owner = load_vae(self.out, self.config.vae, self.device)
            self.config = replace(self.config, vae=self.encoder_owner.config)
        return self.encoder_owner

    def pools(self, size: str) -> Pools:
        """The small or the large pools, filled on first use."""
        made = self.small if size == "small" else self.large
        if made is None:
            begin = time.monotonic()
            encoder = Encoder(
                self.finished_vae(),
                device=self.device,
                tiles=self.preset.encoder_tiles,
                use_graphs=self.preset.graphs,
                compile_blocks=self.preset.compile,
            )
            self.check_encoder(encoder)
            made = Pools(
                self.preset.dit.small if size == "small" else self.preset.dit.large,
                encoder=encoder,
                atlas=self.atlas,
                feed=self.feed,
                row_size=self.config.dit.row_size,
                device=self.device,
            )
            if size == "small":
                self.small = made
            else:
                self.large = made
            log.info("%s pools filled in %.1f s", size, time.monotonic() - begin)
        return made

    def check_encoder(self, encoder: Encoder) -> None:
        plan = self.feed.get("scenes-256").plan[: min(16, len(encoder.pixels))]
        error = encoder.check(self.finished_vae(), render(plan, self.atlas, width=256, height=256))
        log.info("pool encoder against float32: relative error %.4f", error)

    def programs(self, *, large: bool) -> list[tuple[str, ...]]:
        small = tuple(b.name for b in self.preset.dit.small)
        return [tuple(b.name for b in self.preset.dit.large), small] if large else [small]

    def stage_arguments(self) -> dict[str, Any]:
        return {
            "table": self.table, "world": self.world, "out": self.out, "compile_blocks": self.preset.compile,
            "use_graphs": self.preset.graphs, "seed": self.seed,
        }  # fmt: skip

    def run_dit(self, stages: Sequence[str]) -> None:
        wanted = [
            s for s in ("dit256", "mixed") if s in stages and (self.again or not dit.is_finished(self.out, s))
        ]
        if not wanted:
            return
        self.finished_vae()
        trainer = DiTStage(self.config, self.preset.dit, **self.stage_arguments())
        for stage in wanted:
            clock = self.clock_for(stage)
            is_mixed = stage == "mixed"
            pools = [self.pools("small"), *([self.pools("large")] if is_mixed else [])]
            loop = self.preset.dit.mixed_loop if is_mixed else self.preset.dit.small_loop

            def look(model: H3Mini, progress: Progress, stage: str = stage) -> None:
                self.look(
                    stage,
                    self.painter(model),
                    progress,
                    sizes=self.preset.sizes[: 2 if stage == "mixed" else 1],
                )

            trainer.run(stage, self.programs(large=is_mixed), pools, clock, loop, look)

    def run_distil(self) -> None:
        if distil.is_finished(self.out) and not self.again:
            return
        self.finished_vae()
        clock = self.clock_for("distil")
        pools = [self.pools("small"), self.pools("large")]
        stage = DistilStage(self.config, self.preset.distil, **self.stage_arguments())

        def look(model: H3Mini, progress: Progress) -> None:
            self.look("distil", distilled(self.painter(model), model), progress, sizes=self.preset.sizes[:1])

        stage.run(self.programs(large=True), pools, clock, look)

    # Looking at results.

    def painter(self, model: H3Mini) -> Painter:
        return Painter(model, self.finished_vae(), self.atlas, self.tokenizer)

    def load_judge(self) -> Judge | None:
        if self.judge is None and self.judge_path.exists():
            self.judge = load_judge(self.judge_path, self.device)
        return self.judge

    def look(self, name: str, painter: Painter, progress: Progress | None, *, sizes: Sequence[int]) -> None:
        """Contact sheets and a quick evaluation; rank 0 only."""
        begin = time.monotonic()
        judge = self.load_judge()
        records = self.show_cases()
        for size in sizes:
            sheet(painter, records, self.out / f"{name}-{size}.png", width=size, height=size)
            if judge is None:
                log.info("%s: no judge yet, sheets only", name)
                continue
            report = self.evaluate(painter, judge, size=size, cases=self.preset.cases)
            samples = 0.0 if progress is None else progress.samples / 1e6
            log.info("%s eval %d px at %.3f M: %s", name, size, samples, short(report))
            with (self.out / "curve.jsonl").open("a") as file:
                entry = {"stage": name, "samples_m": samples, "size": size, "report": report.json()}
                file.write(json.dumps(entry) + "\n")
        log.info("%s: looked in %.1f s", name, time.monotonic() - begin)

    def show_cases(self) -> list[Any]:
        cases = fixed_cases(5, "single", 4, self.concepts) + fixed_cases(5, "pair", 4, self.concepts)
        for kind in (*EDIT_MIX, *TWO_MIX, *THREE_MIX):
            cases += fixed_cases(5, kind, 2, self.concepts)
        return cases

    def evaluate(self, painter: Painter, judge: Judge, *, size: int, cases: int) -> Report:
        return evaluate(
            painter, atlas=self.atlas, concepts=self.concepts, judge=judge, size=size, num_cases=cases
        )

    def run_eval(self) -> None:
        """Every gate of the stored six-step student, as int8 as it ships; the export; sheets."""
        if not self.world.is_first:
            return
        folder = self.out / "h3_mini"
        total = export(self.out, self.data, folder, self.config)
        log.info("exported %.2f MB to %s", total / 1e6, folder)
        model = H3Mini(self.config)
        model.start(self.table)
        model.to(self.device)
        load_trained(model, self.out, distil.NAME)
        float_painter = distilled(self.painter(model), model)
        shipped = self.shipped_model(folder)
        painter = replace(float_painter, model=shipped)
        records = self.show_cases()
        size = self.preset.sizes[0]
        close = psnr(painter(records, size), float_painter(records, size))
        log.info("int8 against float weights: %.1f dB mean, %.1f dB worst", close.mean(), close.min())
        judge = self.load_judge()
        reports: dict[int, Report] = {}
        if judge is not None:
            teacher = H3Mini(self.config)
            teacher.start(self.table)
            load_trained(teacher, self.out, dit.NAME)
            report = self.evaluate(
                self.painter(teacher.to(self.device)), judge, size=size, cases=self.preset.final_cases
            )
            log.info("teacher at %d px: %s", size, short(report))
            write_json(self.out / f"report-teacher-{size}.json", report.json())
        for size in self.preset.sizes:
            sheet(painter, records, self.out / f"student-{size}.png", width=size, height=size)
            if judge is not None:
                report = self.evaluate(painter, judge, size=size, cases=self.preset.final_cases)
                if reports:
                    report = against_smaller(report, next(iter(reports.values())))
                reports[size] = report
                log.info("student at %d px: %s", size, short(report))
                (self.out / f"report-{size}.md").write_text(report.markdown())
                write_json(self.out / f"report-{size}.json", report.json())
        sheet(painter, records[:16], self.out / "student-512x320.png", width=512, height=320)

    def shipped_model(self, folder: Path) -> H3Mini:
        """The exported weights, expanded by this package's own loader rules."""
        from training.checkpoint import decode

        model = H3Mini(self.config)
        text = decode(load_file(folder / "text_encoder" / "model.safetensors"))
        transformer = decode(load_file(folder / "transformer" / "model.safetensors"))
        model.text_encoder.load_state_dict(text)
        model.transformer.load_state_dict(transformer)
        return model.to(self.device)

    def run(self, stages: Sequence[str]) -> None:
        """The stages in order. Children are always waited for, workers always stopped."""
        self.stages = tuple(stages)
        try:
            self.start_children()
            if "vae" in stages:
                self.run_vae()
            if "mixed" in stages and "dit256" not in stages:
                self.pools("small"), self.pools("large")  # the compilers are busy anyway
            self.wait_for_children(("precompile-small", "precompile-large"), seconds=150)
            self.run_dit(stages)
            self.wait_for_children(("judge", "precompile-teacher"), seconds=60)
            if "distil" in stages:
                self.run_distil()
            if "eval" in stages:
                self.run_eval()
            log.info("chain finished, %.0f s before the deadline", self.deadline - time.monotonic())
        finally:
            for child in self.children.values():
                child.kill()
            self.feed.stop()
            self.world.stop()


SHORT = (
    "t2i/background",
    "t2i/single_top1",
    "t2i/style",
    "t2i/order_and_layout",
    "t2i/both_of_two",
    "t2i/held_out_pair_both",
    "edit/background/gain",
    "edit/black_and_white/gain",
    "edit/mirror/gain",
    "edit/remove/gain",
    "edit/replace/gain",
    "edit/add/gain",
    "edit/style/gain",
    "edit/style/attribute",
    "edit/resize/gain",
    "edit/untouched",
)


def short(report: Report) -> str:
    """The main scores on one line: shares in percent, gains in dB."""
    scores = report.json()["scores"]
    parts = []
    for name in SHORT:
        if name in scores:
            value = scores[name]["value"]
            parts.append(
                f"{name.removeprefix('t2i/')} {value:.1f}"
                if "gain" in name
                else f"{name.removeprefix('t2i/')} {100 * value:.0f}%"
            )
    return "  ".join(parts)


def alone() -> dict[str, str]:
    """The environment for a side process: not one of the ranks, and on this process's GPU."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
    return {name: value for name, value in os.environ.items() if name not in ranks}
