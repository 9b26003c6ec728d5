"""What precision costs on the device: the trained model against float32 on the host, and full-size blocks.

Called by on_device.py. The trained model goes through gates A to D of docs/h3-mini.md: branches, whole
pictures, and what they show. A full-size model of random weights has no pictures; its branches are compared
block by block with those in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from device_pictures import BF16, FP8, PROMPT, SMALL, WEIGHTS, drawing
from torch import Tensor

from portable_dit.engine import Engine
from portable_dit.evaluation.builtin.cases import CASES, Case, Cases, as_tensor, load_cases
from portable_dit.evaluation.builtin.scores import EDIT_GATES, T2I_GATES, psnr, score_edits, score_t2i
from portable_dit.models.h3_image.model import H3Image
from portable_dit.workers.inline import ThisProcess
from training.branch_check import (
    FAULTS,
    LIMITS,
    SET_UPS,
    STEPS,
    Trace,
    Wish,
    branch_errors,
    load,
    prompts,
    trace,
    wishes,
    worst,
)
from training.paint import paint_cases

if TYPE_CHECKING:
    from on_device import Report

DEVICE = {"device.backend": "cuda", "device.name": None, "precision": "bfloat16", "prompt_cache_mib": 0}
WAYS: dict[str, tuple[dict[str, Any], str]] = {  # what to change, and whose limit it has
    "float32": ({"precision": "float32"}, "float32"),
    "bfloat16": ({}, "bfloat16"),
    "bfloat16, no graphs": ({"graphs.dit": False, "graphs.vae": False}, "bfloat16"),
    "fp8_row": ({"quantization.dit": "fp8_row"}, "8 bits"),
    "fp8_block128": ({"quantization.dit": "fp8_block128"}, "8 bits"),
    "mxfp8, emulated": ({"quantization.dit": "mxfp8"}, "8 bits"),
    "int8_row": ({"quantization.dit": "int8_row"}, "8 bits"),
    "int8_row_rotated": ({"quantization.dit": "int8_row_rotated"}, "8 bits"),
    "fp8 attention": ({"attention": "fa3_fp8"}, "8 bits"),
    "layerwise": ({"offload.dit": "layerwise"}, "bfloat16"),
    "component": ({f"offload.{c}": "component" for c in ("text_encoder", "dit", "vae")}, "bfloat16"),
}
LEAST_DB = {"float32": 45.0, "bfloat16": 34.0, "8 bits": 20.0}  # of the worst of the pictures
BY_BLOCK = ("fp8_row", "int8_row_rotated")
JUDGED = ("bfloat16", "fp8_row", "fp8 attention", "int8_row")
ALLOWED_BELOW = 0.05  # of a share, for cases so few: three of sixty


def branches(report: Report) -> None:
    """Gate A for every way of computing, and two injected faults that it must catch."""
    cases = load_cases(CASES)
    reference = load(SET_UPS["float32"])
    traces = [trace(reference, wish) for wish in wishes(cases)]
    for name, (keys, limit) in WAYS.items():
        if not name.startswith(("layerwise", "component", "bfloat16, ")):  # they change no branch
            _judge_branches(report, name, traces, load(DEVICE | keys), LIMITS[limit])
    for fault in FAULTS:
        broken = load(DEVICE)
        fault(broken, 2)
        found = [branch_errors(seen, broken)[step, 2, "attention"] for seen in traces for step in STEPS]
        report.check(f"caught: {fault.__name__}", min(found) > 3 * LIMITS["8 bits"], f"{min(found):.2f}")


def _judge_branches(report: Report, name: str, traces: list[Trace], model: H3Image, limit: float) -> None:
    errors = [branch_errors(seen, model) for seen in traces]
    attention, mlp = worst(errors, "attention"), worst(errors, "mlp")
    report.check(
        f"branches, {name}", max(attention, mlp) <= limit, f"attention {attention:.1e}, MLP {mlp:.1e}"
    )


def pictures(report: Report) -> None:
    """Gate B: whole pictures of six steps against float32 on the host."""
    some = prompts(load_cases(CASES))[::3]
    with Engine.load("cpu/h3-mini", SET_UPS["float32"]) as exact:
        expected = paint_cases(exact, some, size=256)
    drawn: dict[str, Tensor] = {}
    for name, (keys, limit) in WAYS.items():
        with Engine.load("cpu/h3-mini", DEVICE | keys) as engine:
            drawn[name] = paint_cases(engine, some, size=256)
        distance = psnr(drawn[name], expected)
        text = f"mean {distance.mean():.1f} dB, worst {distance.min():.1f} of {len(some)}"
        report.check(f"pictures, {name}", distance.min().item() >= LEAST_DB[limit], text)
    for name in ("bfloat16, no graphs", "layerwise", "component"):
        report.check(f"{name}: the same pixels", torch.equal(drawn[name], drawn["bfloat16"]))


def meaning(report: Report) -> None:
    """Gates C and D: a judge names what the pictures show, and what edits changed."""
    cases = load_cases(CASES)
    for name in JUDGED:
        with Engine.load("cpu/h3-mini", DEVICE | WAYS[name][0]) as engine:
            scores = _scores(engine, cases)
        missed = {k: v for k, (v, least) in scores.items() if v < least - ALLOWED_BELOW}
        text = ", ".join(f"{k} {v:.2f}" for k, (v, _) in scores.items())
        report.check(f"meaning, {name}", not missed, text)


def _scores(engine: Engine, cases: Cases) -> Mapping[str, tuple[float, float]]:
    """Shares that are right, and those that are needed, by gate."""
    text = cases.where(lambda case: not case.references)
    records, held_out = [case.record for case in text], [case.held_out for case in text]
    found = score_t2i(records, paint_cases(engine, text, size=256), cases.judge, held_out=held_out)
    shares = {name: (found[name].value, least) for name, least in T2I_GATES.items()}
    some = cases.where(lambda case: len(case.references) == 1)
    outputs = paint_cases(engine, some, size=256)
    edits = score_edits([case.record for case in some], outputs, *_sources_and_targets(some), cases.judge)
    for kind, (_, least) in EDIT_GATES.items():
        # Six of a kind: one more wrong than the gate allows is a sixth.
        shares[f"{kind}/attribute"] = edits[f"{kind}/attribute"].value, least - 1 / 6 + ALLOWED_BELOW
    return shares


def _sources_and_targets(some: tuple[Case, ...]) -> tuple[Tensor, Tensor]:
    targets = [case.target for case in some if case.target is not None]
    return torch.stack([as_tensor(case.references[0]) for case in some]), torch.stack(targets)


def by_block(report: Report) -> None:
    """Full-size branches in 8 bits, each fed what the block is given in bfloat16; which block is worst."""
    wish = Wish(PROMPT, size=SMALL if WEIGHTS == "random" else (256, 256))
    with drawing(BF16) as engine:
        reference = trace(_model(engine), wish, steps=(0,))
    for format in BY_BLOCK:
        with drawing(FP8, (("quantization.dit", format),)) as engine:
            errors = branch_errors(reference, _model(engine))
        for branch in ("attention", "mlp"):
            found = {block: error for (_, block, kind), error in errors.items() if kind == branch}
            most = max(found, key=lambda block: found[block])
            median = sorted(found.values())[len(found) // 2]
            text = f"median {median:.4f}, worst {found[most]:.4f} in block {most} of {len(found)}"
            report.measured(f"{branch}, {format}", text, errors=list(found.values()))


def _model(engine: Engine) -> H3Image:
    assert isinstance(engine.workers, ThisProcess)
    model = engine.workers.loaded.model
    assert isinstance(model, H3Image)
    return model
