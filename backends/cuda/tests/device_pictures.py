"""Whole pictures of full-size H3-Image with random weights: stages, memory, ceilings, and diffusers' module.

Called by on_device.py. `H3_WEIGHTS` names a checkpoint folder instead of random weights, for instance a tiny
one to try this on; the diffusers part then has nothing to compare and is left out.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from device_bench import BACKEND, CONFIG, PRODUCTS, step_ceiling
from device_bench import milliseconds as device_milliseconds

from portable_dit.engine import Engine
from portable_dit.models.h3_image.config import H3Config
from portable_dit.request import Request
from portable_dit.workers.inline import ThisProcess

if TYPE_CHECKING:
    from on_device import Report

GIB = 2**30
WEIGHTS = os.environ.get("H3_WEIGHTS", "random")
PROMPT = "a lighthouse on a cliff above a stormy sea, seen from the air, in the last light of the day"
SMALL, LARGE = (2048, 2048), (4096, 4096)
FP8, BF16 = "nvidia/h200/h3-image-1x-fp8", "nvidia/h200/h3-image-1x-bf16"


@dataclass(frozen=True)
class Case:
    """One way to draw: a recipe with changes, at a size, so many times."""

    name: str
    recipe: str
    size: tuple[int, int]
    requests: int
    format: str
    changes: tuple[tuple[str, Any], ...] = ()
    references: int = 0
    targets: tuple[tuple[str, float], ...] = ()  # seconds of a stage; "total": from the prompt to the bytes


@dataclass(frozen=True)
class Drawn:
    """What a case took: seconds in all and of a step, rows of a step, latent cells along its references."""

    seconds: float
    step: float
    rows: int
    reference_sides: tuple[int, ...]


CASES = (
    Case("fp8 2048", FP8, SMALL, 10, "fp8_row", targets=(("total", 1.25),)),
    Case(
        "fp8 4096",
        FP8,
        LARGE,
        4,
        "fp8_row",
        targets=(("total", 6.9), ("vae_decode", 0.25), ("encode_png", 0.12)),
    ),
    Case("fp8 2048, one reference", FP8, SMALL, 3, "fp8_row", references=1),
    Case("bf16 2048", BF16, SMALL, 5, "bfloat16"),
    Case("bf16 4096", BF16, LARGE, 2, "bfloat16"),
    Case("bf16 2048, one reference", BF16, SMALL, 2, "bfloat16", references=1),
    Case("bf16 4096, one reference", BF16, LARGE, 1, "bfloat16", references=1),
    Case("fp8 attention 2048", FP8, SMALL, 3, "fp8_row", (("attention", "fa3_fp8"),)),
    Case(
        "fp8 attention 4096", FP8, LARGE, 3, "fp8_row", (("attention", "fa3_fp8"),), targets=(("total", 6.0),)
    ),
)
MOST_DIT_BYTES = {"fp8_row": 21e9, "bfloat16": 41e9}
OVERLAP = 0.85  # of the longer of copies and computation
FLAT = 64 << 20  # bytes that may come and go between equal requests
REFERENCE_FACTOR = 1.25  # times the ratio of the transformer's operations
AGAINST_DIFFUSERS = {"fp8_row": 2.0, "bfloat16": 1.25}  # times as fast
drawn: dict[Case, Drawn] = {}  # by `pictures`, for `diffusers` to compare with


@contextmanager
def drawing(recipe: str, changes: tuple[tuple[str, Any], ...] = ()) -> Iterator[Engine]:
    """An engine for one of the recipes, and an empty device after it."""
    overrides = {"weights": WEIGHTS, "prompt_cache_mib": 0, **dict(changes)}
    with Engine.load(recipe, overrides) as engine:
        yield engine
    gc.collect()
    BACKEND.trim(BACKEND.devices()[0])


def pictures(report: Report) -> None:
    """Every case; those of one recipe and the same changes share a load."""
    groups: dict[tuple[str, tuple[tuple[str, Any], ...]], list[Case]] = {}
    for case in CASES:
        groups.setdefault((case.recipe, case.changes), []).append(case)
    for (recipe, changes), cases in groups.items():
        with drawing(recipe, changes) as engine:
            held = torch.cuda.memory_allocated()
            dit = sum(t.nbytes for t in (*_transformer(engine).parameters(), *_transformer(engine).buffers()))
            report.measured(f"{cases[0].name}: loaded", f"{held / GIB:.1f} GiB, DiT {dit / 1e9:.2f} GB")
            if not changes:
                most = MOST_DIT_BYTES[cases[0].format]
                report.check(
                    f"{cases[0].name}: DiT <= {most / 1e9:.0f} GB", dit <= most, f"{dit / 1e9:.2f} GB"
                )
            for case in cases:
                drawn[case] = _draw(report, engine, case)
                if case.references:
                    _compare_with_text(report, case)


def _compare_with_text(report: Report, case: Case) -> None:
    """What a reference costs, next to the operations that it adds to the transformer."""
    plain = case.name.partition(",")[0]
    with_one, without = drawn[case], next(found for other, found in drawn.items() if other.name == plain)
    ratio, growth = with_one.seconds / without.seconds, _operations(with_one.rows) / _operations(without.rows)
    text = f"{ratio:.2f} times {plain}; the transformer's operations grow {growth:.2f} times"
    report.check(
        f"{case.name}: <= {REFERENCE_FACTOR} of the operations' ratio",
        ratio <= REFERENCE_FACTOR * growth,
        text,
    )


def _operations(rows: int) -> float:
    """Of one block, in multiply-adds."""
    weights = sum(inputs * outputs for inputs, outputs in PRODUCTS.values())
    return float(rows * weights + 2 * rows**2 * CONFIG.inner_size)


def _request(case: Case, references: int) -> Request:
    from numpy import random

    picture = random.default_rng(0).integers(0, 256, (*case.size[::-1], 3), dtype="uint8")
    return Request(PROMPT, size=case.size, references=(picture,) * references, format="png")


def _transformer(engine: Engine) -> torch.nn.Module:
    assert isinstance(engine.workers, ThisProcess)
    return engine.workers.loaded.model.component("dit")


def _draw(report: Report, engine: Engine, case: Case) -> Drawn:
    """Draws the case again and again; medians."""
    resolved = engine.setup.resolve(_request(case, case.references))
    seen: list[int] = []
    block = _transformer(engine).blocks[0]
    watch = block.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[1]))
    engine.generate(resolved)  # records graphs
    watch.remove()
    rows = seen[0]
    device = BACKEND.devices()[0]
    BACKEND.peak_bytes(device, reset=True)
    results, held = [], []
    for _ in range(case.requests):
        results.append(engine.generate(resolved))
        held.append(torch.cuda.memory_allocated())
    peak = BACKEND.peak_bytes(device) or 0
    stages = {key: statistics.median(r.seconds[key] for r in results) for key in results[0].seconds}
    step = statistics.median(s for r in results for image in r.images for s in image.step_seconds)
    text = ", ".join(f"{key} {value:.3f}" for key, value in stages.items())
    report.measured(case.name, f"{text} s; peak {peak / GIB:.1f} GiB", **stages, step=step, peak=peak)
    for stage, most in case.targets:
        report.check(f"{case.name}: {stage} <= {most} s", stages[stage] <= most, f"{stages[stage]:.3f}")
    least = step_ceiling(rows, case.format) / 1e3
    text = f"{step:.4f} s of {least:.4f}: {step / least:.3f}"
    report.measured(f"{case.name}: step over its ceiling", text, rows=rows)
    same = {image.data() for r in results for image in r.images}
    report.check(f"{case.name}: {case.requests} times the same bytes", len(same) == 1)
    report.check(
        f"{case.name}: memory is flat", max(held) - min(held) <= FLAT, f"{max(held) - min(held)} bytes"
    )
    ratio = H3Config().vae.ratio
    sides = tuple(reference.pixels.shape[0] // ratio for reference in resolved.references)
    return Drawn(stages["total"], step, rows, sides)


def diffusers(report: Report) -> None:
    """Eager BF16 steps of diffusers' module, with as many rows of each kind as `pictures` had in this run."""
    from dit_step import diffusers_step, empty_diffusers_model, inputs

    if WEIGHTS != "random":
        return
    config = H3Config()
    with torch.device("meta"):
        theirs = empty_diffusers_model(config).to(torch.bfloat16)
    theirs.to_empty(device="cuda")
    for parameter in theirs.parameters():
        wide = parameter.ndim > 1
        parameter.data.normal_(0.0, parameter[0].numel() ** -0.5) if wide else parameter.data.fill_(1.0)
    for buffer in theirs.buffers():
        buffer.zero_()
    for name, module in theirs.named_modules():
        if name.split(".")[0] in (theirs._keep_in_fp32_modules or ()):
            module.float()
    taken: dict[tuple[int, int], float] = {}  # milliseconds of a step, by side and rows
    for case, ours in drawn.items():
        side = case.size[0] // config.vae.ratio
        key = side, ours.rows
        if key not in taken:
            pictures = sum((cells // 2) ** 2 for cells in (side, *ours.reference_sides))
            given = inputs(config.dit, side, ours.rows - pictures, ours.reference_sides)
            assert len(given.packing.tags) == ours.rows
            step = diffusers_step(theirs, given, dtype=torch.bfloat16, device="cuda")
            taken[key] = device_milliseconds(step, repeats=5, warm_up=2)
        ratio = taken[key] / 1e3 / ours.step
        text = f"diffusers {taken[key]:.1f} ms, engine {1e3 * ours.step:.1f}: {ratio:.2f}; {ours.rows} rows"
        if case.changes:
            report.measured(f"one step, {case.name}", text)
        else:
            report.check(f"one step, {case.name}", ratio >= AGAINST_DIFFUSERS[case.format], text)
    del theirs, step
    gc.collect()
    BACKEND.trim(BACKEND.devices()[0])


def capped(report: Report) -> None:
    """Under 24 GiB: FP8, layers streamed from the host, text encoder and VAE visiting."""
    device = BACKEND.devices()[0]
    BACKEND.limit_memory(device, 24 * GIB)
    try:
        changes = (
            ("offload.dit", "layerwise"),
            ("offload.text_encoder", "layerwise"),
            ("offload.vae", "component"),
            ("device.memory_gib", 24),
        )
        with drawing(FP8, changes) as engine:
            case = Case("fp8 2048 in 24 GiB", FP8, SMALL, 3, "fp8_row")
            drawn = _draw(report, engine, case)
            _overlap(report, engine, case, drawn.step)
    finally:
        BACKEND.limit_memory(device, torch.cuda.mem_get_info(device.index)[1])


def _overlap(report: Report, engine: Engine, case: Case, step: float) -> None:
    """The longer of a step's copies and computation, each alone, over the step: 1 where one hides the other.

    Copies alone are told from how fast one buffer of 1 GiB is copied.
    """
    assert isinstance(engine.workers, ThisProcess)
    dit = next(s for s in engine.workers.loaded.streamed if s._blocks[0] is _transformer(engine).blocks[0])
    source, target = BACKEND.host_buffer(GIB), torch.empty(GIB, dtype=torch.uint8, device="cuda")
    copies = device_milliseconds(lambda: target.copy_(source, non_blocking=True)) / 1e3
    copies *= dit.host_bytes / GIB
    copy, dit._copies.copy = dit._copies.copy, lambda *tensors: None  # computes with what the slots hold
    try:
        resolved = engine.setup.resolve(_request(case, 0))
        images = [image for _ in range(2) for image in engine.generate(resolved).images]
    finally:
        dit._copies.copy = copy
    compute = statistics.median(seconds for image in images for seconds in image.step_seconds)
    share = max(copies, compute) / step
    text = f"copies {copies:.4f} s ({dit.host_bytes / GIB:.1f} GiB), computation {compute:.4f}"
    text += f", together {step:.4f}: {share:.3f}"
    report.check(f"{case.name}: overlap >= {OVERLAP}", share >= OVERLAP, text)
