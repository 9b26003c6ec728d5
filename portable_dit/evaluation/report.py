"""The report of an evaluation: means over all and for each type, and whether the gate is met."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from portable_dit.evaluation.judging import Judgement
from portable_dit.evaluation.suite import Suite


@dataclass(frozen=True)
class Mean:
    """The mean score of `count` samples, None of none. unscored: samples that have no score."""

    mean: float | None
    count: int
    unscored: int


@dataclass(frozen=True)
class EvaluationReport:
    """passed: every mean is at least the gate, and every sample has a score. notes: limits of that."""

    suite: str
    judge: str
    overall: Mean
    types: dict[str, Mean]
    gate: float
    passed: bool
    notes: tuple[str, ...]
    judgements: tuple[Judgement, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_report(suite: Suite, judge: str, judgements: Sequence[Judgement]) -> EvaluationReport:
    overall = _mean(judgements)
    types = {
        name: _mean([judgement for judgement in judgements if judgement.type == name])
        for name in dict.fromkeys(judgement.type for judgement in judgements)
    }
    means = [overall, *types.values()]
    return EvaluationReport(
        suite=suite.name,
        judge=judge,
        overall=overall,
        types=types,
        gate=suite.gate,
        passed=all(m.mean is not None and m.mean >= suite.gate and not m.unscored for m in means),
        notes=suite.notes,
        judgements=tuple(judgements),
    )


def _mean(judgements: Sequence[Judgement]) -> Mean:
    scores = [judgement.score for judgement in judgements if judgement.score is not None]
    return Mean(statistics.fmean(scores) if scores else None, len(scores), len(judgements) - len(scores))
