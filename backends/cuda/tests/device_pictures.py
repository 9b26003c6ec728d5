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
from device_bench import BACKEND, CONFIG, ceilings
from device_bench import milliseconds as device_milliseconds

from portable_dit.engine import Engine
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
    target: float | None = None  # seconds from the prompt to the file's bytes


CASES = (
    Case("fp8 2048", FP8, SMALL, 10, "fp8_row", target=1.25),
    Case("fp8 4096", FP8, LARGE, 10, "fp8_row", target=6.9),
    Case("fp8 2048, one reference", FP8, SMALL, 5, "fp8_row", references=1),
    Case("bf16 2048", BF16, SMALL, 5, "bfloat16"),
    Case("fp8 attention 4096", FP8, LARGE, 3, "fp8_row", (("attention", "fa3_fp8"),), target=6.0),
)


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
            dit = sum(t.nbytes for t in _tensors(engine))
            report.measured(f"{cases[0].name}: loaded", f"{held / GIB:.1f} GiB, DiT {dit / 1e9:.2f} GB")
            if cases[0].format == "fp8_row" and not changes:
                report.check("resident fp8 DiT <= 21 GB", dit <= 21e9, f"{dit / 1e9:.2f} GB")
            for case in cases:
                _draw(report, engine, case)


def _tensors(engine: Engine) -> list[torch.Tensor]:
    assert isinstance(engine.workers, ThisProcess)
    module = engine.workers.loaded.model.component("dit")
    return [*module.parameters(), *module.buffers()]


def _draw(report: Report, engine: Engine, case: Case) -> None:
    from numpy import random

    picture = random.default_rng(0).integers(0, 256, (*case.size[::-1], 3), dtype="uint8")
    request = Request(PROMPT, size=case.size, references=(picture,) * case.references, format="png")
    resolved = engine.setup.resolve(request)
    engine.generate(resolved)
    engine.generate(resolved)  # the second records graphs where the first warmed up
    device = BACKEND.devices()[0]
    BACKEND.peak_bytes(device, reset=True)
    results = [engine.generate(resolved) for _ in range(case.requests)]
    peak = BACKEND.peak_bytes(device) or 0
    stages = {key: statistics.median(r.seconds[key] for r in results) for key in results[0].seconds}
    step = statistics.median(s for r in results for image in r.images for s in image.step_seconds)
    text = ", ".join(f"{key} {value:.3f}" for key, value in stages.items())
    report.measured(case.name, f"{text} s; peak {peak / GIB:.1f} GiB", **stages, step=step, peak=peak)
    if case.target is not None:
        report.check(
            f"{case.name} <= {case.target} s", stages["total"] <= case.target, f"{stages['total']:.3f}"
        )
    if not case.references:
        rows = engine.setup.spec.rows(engine.setup.plan_of(resolved).workload)
        least = ceilings(rows)[case.format] * CONFIG.num_layers / 1e3
        report.measured(
            f"{case.name}: step over its ceiling",
            f"{step:.4f} s of {least:.4f}: {step / least:.3f}",
            rows=rows,
        )
    same = {image.data() for r in results for image in r.images}
    report.check(f"{case.name}: {case.requests} times the same bytes", len(same) == 1)


def diffusers(report: Report) -> None:
    """Six eager steps of diffusers' module in BF16, next to the engine's step in the same run."""
    from dit_step import diffusers_step, empty_diffusers_model, inputs

    from portable_dit.models.h3_image.config import H3Config

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
    for size in (SMALL, LARGE):
        given = inputs(config.dit, size[0] // config.vae.ratio, text_rows=64)
        step = diffusers_step(theirs, given, dtype=torch.bfloat16, device="cuda")
        ms = device_milliseconds(step, repeats=5, warm_up=2)
        report.measured(f"one step at {size[0]}", f"{ms:.1f} ms, six {6 * ms / 1e3:.2f} s", ms=ms)
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
            _draw(report, engine, Case("fp8 2048 in 24 GiB", FP8, SMALL, 2, "fp8_row"))
    finally:
        BACKEND.limit_memory(device, torch.cuda.mem_get_info(device.index)[1])


def builtin(report: Report) -> None:
    """The trained model on the device against its own float32 pictures on the host."""
    prompts = (
        "a red apple on a blue background, 3d style",
        "a dog to the left of a tree on a green background",
    )
    with Engine.load("cpu/h3-mini", {"precision": "float32"}) as engine:
        wanted = [engine.generate(Request(p, size=(256, 256))).images[0].pixels for p in prompts]
    own = {"device.backend": "cuda", "precision": "bfloat16"}
    for name, changes in (
        ("float32", {"precision": "float32"}),
        ("bfloat16", {}),
        ("bfloat16, eager", {"graphs.dit": False, "graphs.vae": False}),
        ("fp8_row", {"quantization.dit": "fp8_row"}),
        ("int8_row", {"quantization.dit": "int8_row"}),
        ("mxfp8", {"quantization.dit": "mxfp8"}),
        ("fp8_block128", {"quantization.dit": "fp8_block128"}),
        ("layerwise", {"offload.dit": "layerwise"}),
    ):
        with Engine.load("cpu/h3-mini", {**own, **changes}) as engine:
            got = [engine.generate(Request(p, size=(256, 256))).images[0].pixels for p in prompts]
        decibels = [_psnr(a, b) for a, b in zip(got, wanted, strict=True)]
        least = {"float32": 45.0, "bfloat16": 34.0}.get(name.split(",")[0], 20.0)
        report.check(name, min(decibels) >= least, ", ".join(f"{db:.1f} dB" for db in decibels))


def _psnr(a: Any, b: Any) -> float:
    error = float(((a.astype("float64") - b.astype("float64")) ** 2).mean())
    return 99.0 if error == 0 else float(10 * torch.log10(torch.tensor(255.0**2 / error)))
