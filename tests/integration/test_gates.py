"""The quality gates of the shipped weights, drawn by the engine, on a subset of what docs/h3-mini.md reports.

Seeds are fixed and everything is float32, so each share is a constant of the weights and not a draw. That is
why gates are asserted at their full height: an interval for so few cases would let a much weaker model pass.
512 pixels are judged by pairs: of the same prompts and seeds as at 256, at most one more may be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from portable_dit.engine import Engine
from portable_dit.evaluation.builtin.cases import CASES, Case, Cases, as_tensor, load_cases
from portable_dit.evaluation.builtin.judge import judge_images, label
from portable_dit.evaluation.builtin.scores import (
    EDIT_GATES,
    T2I_GATES,
    UNTOUCHED_DB,
    UNTOUCHED_SHARE,
    Score,
    attribute_right,
    concepts_right,
    score_edits,
    score_t2i,
)
from training.branch_check import swap_two_query_heads
from training.gates import score_multi
from training.paint import paint_cases

# Gates that these weights miss on this subset; the strict xfail tells when one of them begins to hold.
OPEN = {
    "remove attribute": "5 of 6 right, 90 % needed; 97 % of the 64 in the full report",
}
MOST = 16  # prompts of a kind that are drawn; docs/h3-mini.md has the figures of many more
ROUNDING = 1e-6  # a share is a float32 mean: 27 of 30 is 0.89999998


@pytest.fixture(scope="module")
def cases() -> Cases:
    return load_cases(CASES)


@pytest.fixture(scope="module")
def engine():
    with Engine.load("cpu/h3-mini", {"precision": "float32"}) as loaded:
        yield loaded


def edits_of(cases: Cases) -> tuple[Case, ...]:
    return cases.where(lambda case: len(case.references) == 1)


def sources_and_targets(some: tuple[Case, ...]) -> tuple[Tensor, Tensor]:
    targets = [case.target for case in some if case.target is not None]
    return torch.stack([as_tensor(case.references[0]) for case in some]), torch.stack(targets)


def show(name: str, score: Score) -> str:
    return f"{name}: {score.value:.3f} of {score.count} cases"


@pytest.fixture(scope="module")
def painted(engine: Engine, cases: Cases) -> dict[str, Tensor]:
    """Pictures of prompts without references, at 256 pixels, by the id of their case."""
    kinds: dict[tuple[str, bool], list[Case]] = {}
    for case in cases.where(lambda case: not case.references):
        kinds.setdefault((case.record.kind, case.held_out), []).append(case)
    some = [case for kind in kinds.values() for case in kind[:MOST]]
    return {case.id: one for case, one in zip(some, paint_cases(engine, some, size=256), strict=True)}


@pytest.fixture(scope="module")
def t2i(cases: Cases, painted: dict[str, Tensor]) -> dict[str, Score]:
    some = [case for case in cases.cases if case.id in painted]
    records, held_out = [case.record for case in some], [case.held_out for case in some]
    return score_t2i(records, torch.stack(list(painted.values())), cases.judge, held_out=held_out)


@pytest.fixture(scope="module")
def edits(engine: Engine, cases: Cases) -> dict[str, Score]:
    some = edits_of(cases)
    outputs = paint_cases(engine, some, size=256)
    return score_edits([case.record for case in some], outputs, *sources_and_targets(some), cases.judge)


@pytest.mark.parametrize("name", T2I_GATES)
def test_text_to_image_meets_its_gate(name: str, t2i: Mapping[str, Score]) -> None:
    assert t2i[name].count >= 16
    assert t2i[name].value >= T2I_GATES[name] - ROUNDING, show(name, t2i[name])


def gate(name: str, *values: object) -> object:
    """A parameter set, expected to fail when its gate is an open one."""
    marks = [pytest.mark.xfail(strict=True, reason=OPEN[name])] if name in OPEN else []
    return pytest.param(*values, marks=marks, id=name)


@pytest.mark.parametrize(("kind", "least"), [gate(f"{k} gain", k, db) for k, (db, _) in EDIT_GATES.items()])
def test_an_edit_comes_closer_to_its_target_than_the_source_was(
    kind: str, least: float, edits: Mapping[str, Score]
) -> None:
    assert edits[f"{kind}/gain"].value >= least, show(kind, edits[f"{kind}/gain"])


@pytest.mark.parametrize(
    ("kind", "least"), [gate(f"{k} attribute", k, share) for k, (_, share) in EDIT_GATES.items()]
)
def test_an_edit_does_what_was_asked(kind: str, least: float, edits: Mapping[str, Score]) -> None:
    assert edits[f"{kind}/attribute"].value >= least - ROUNDING, show(kind, edits[f"{kind}/attribute"])


def test_what_an_edit_does_not_name_stays_as_it_was(edits: Mapping[str, Score]) -> None:
    assert edits["untouched"].value >= UNTOUCHED_SHARE, show(f"over {UNTOUCHED_DB} dB", edits["untouched"])


def test_several_references_come_together_in_one_picture(engine: Engine, cases: Cases) -> None:
    """A floor, since no gate is set for these; the style of a reference is not carried over yet."""
    some = cases.where(lambda case: len(case.references) > 1)
    records = [case.record for case in some]
    assert {len(record.references) for record in records} == {2, 3}
    targets = torch.stack([case.target for case in some if case.target is not None])
    scores = score_multi(records, paint_cases(engine, some, size=256), targets, cases.judge)
    kinds = {record.kind for record in records}
    for attribute, least in (("objects", 0.6), ("background", 0.9)):
        right = sum(scores[f"{kind}/{attribute}"].value for kind in kinds) / len(kinds)
        assert right >= least, attribute


def test_at_512_pixels_at_most_one_more_picture_is_wrong(
    engine: Engine, cases: Cases, painted: dict[str, Tensor]
) -> None:
    singles = cases.where(lambda case: case.record.kind == "single" and not case.held_out)[:4]
    pairs = cases.where(lambda case: case.record.kind == "pair" and not case.held_out)[:3]
    some = (*singles, *pairs)
    wrong = {}
    at_256 = torch.stack([painted[case.id] for case in some])
    for size, images in {256: at_256, 512: paint_cases(engine, some, size=512)}.items():
        labels = label([case.record.target for case in some])
        _, concept, _ = judge_images(cases.judge, images)
        first, both = concepts_right(concept, labels)
        shown = torch.where(labels.layout <= 2, first, both)
        wrong[size] = len(some) - int(shown.sum())
    assert wrong[512] <= wrong[256] + 1, wrong


def test_edits_work_at_512_pixels(engine: Engine, cases: Cases) -> None:
    """From references of 256 pixels, which the engine brings to the size of the canvas."""
    some = [next(c for c in cases.cases if c.record.kind == k) for k in ("background", "add")]
    outputs = paint_cases(engine, some, size=512)
    halved = torch.nn.functional.avg_pool2d(outputs, 2)
    records = [case.record for case in some]
    right = attribute_right(records, halved, *sources_and_targets(tuple(some)), cases.judge)
    assert right.all(), right


def test_returning_the_source_fails_every_edit_gate(cases: Cases) -> None:
    some = edits_of(cases)
    sources, targets = sources_and_targets(some)
    scores = score_edits([case.record for case in some], sources, sources, targets, cases.judge)
    for kind, (gain, share) in EDIT_GATES.items():
        assert scores[f"{kind}/gain"].value == 0 < gain
        assert scores[f"{kind}/attribute"].value < share, kind


def test_exact_pictures_pass_every_edit_gate_so_the_judge_is_not_what_fails(cases: Cases) -> None:
    some = edits_of(cases)
    sources, targets = sources_and_targets(some)
    scores = score_edits([case.record for case in some], targets, sources, targets, cases.judge)
    for kind, (gain, share) in EDIT_GATES.items():
        assert scores[f"{kind}/gain"].value > gain
        assert scores[f"{kind}/attribute"].value >= share, kind


def test_one_block_with_two_heads_swapped_fails_the_text_to_image_gates(cases: Cases) -> None:
    some = cases.where(lambda case: case.record.kind == "single" and not case.held_out)[:10]
    with Engine.load("cpu/h3-mini", {"precision": "float32"}) as engine:
        swap_two_query_heads(engine.workers.loaded.model, 0)
        scores = score_t2i([c.record for c in some], paint_cases(engine, some, size=256), cases.judge)
    assert scores["single_top1"].value < T2I_GATES["single_top1"]
