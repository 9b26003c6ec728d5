"""The gates of h3-mini for pictures that a server draws; what `portable-dit eval --suite builtin` runs.

Text to image is gate C, edits with one reference are gate D.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from portable_dit.evaluation.builtin.cases import CASES, Case, as_tensor, load_cases
from portable_dit.evaluation.builtin.scores import (
    EDIT_GATES,
    T2I_GATES,
    UNTOUCHED_SHARE,
    Score,
    score_edits,
    score_t2i,
)
from portable_dit.image import encode, read_image

SIZE = 256
ROUNDING = 1e-6  # a share is a float32 mean: 27 of 30 is 0.89999998


def evaluate_served(
    draw: Callable[..., bytes], *, samples_per_type: int | None = None, on_case: Callable[[str], None]
) -> dict[str, Any]:
    """JSON-able scores and gates. draw: as of `server.client.Client`. samples_per_type: None = all."""
    cases = load_cases(CASES)
    kept: dict[str, list[Case]] = {}
    for case in cases.cases:
        if len(case.references) < 2:
            kept.setdefault(f"{case.record.kind}{' held out' if case.held_out else ''}", []).append(case)
    some = [case for kind in kept.values() for case in kind[:samples_per_type]]
    pictures = {}
    for case in some:
        on_case(case.id)
        references = [encode(pixels, {}) for pixels in case.references]
        seed = int(case.id.rpartition("-")[2])
        data = draw(case.record.caption, references, size=f"{SIZE}x{SIZE}", seed=seed)
        pictures[case.id] = as_tensor(read_image(data).pixels)
    plain = [case for case in some if not case.references]
    edits = [case for case in some if case.references]
    scores = {
        f"t2i/{name}": score
        for name, score in score_t2i(
            [case.record for case in plain],
            torch.stack([pictures[case.id] for case in plain]),
            cases.judge,
            held_out=[case.held_out for case in plain],
        ).items()
    }
    scores |= {
        f"edit/{name}": score
        for name, score in score_edits(
            [case.record for case in edits],
            torch.stack([pictures[case.id] for case in edits]),
            torch.stack([as_tensor(case.references[0]) for case in edits]),
            torch.stack([case.target for case in edits if case.target is not None]),
            cases.judge,
        ).items()
    }
    gates = gates_of(scores)
    everything = sum(map(len, kept.values()))
    return {
        "suite": "builtin",
        "judge": "builtin",
        "pictures": len(some),
        **verdict_of(gates, len(some), everything),
        "scores": {name: vars(score) for name, score in scores.items() if score.count},
    }


def gates_of(scores: dict[str, Score]) -> list[dict[str, Any]]:
    """Every gate with what was measured, and whether it is passed, missed or undecided."""
    needed = {f"t2i/{name}": least for name, least in T2I_GATES.items()}
    for kind, (gain, right) in EDIT_GATES.items():
        needed |= {f"edit/{kind}/gain": gain, f"edit/{kind}/attribute": right}
    needed["edit/untouched"] = UNTOUCHED_SHARE
    return [
        {
            "name": name,
            "value": scores[name].value if scores[name].count else None,
            "needed": least,
            "count": scores[name].count,
            "outcome": outcome_of(scores[name], least),
        }
        for name, least in needed.items()
    ]


def outcome_of(score: Score, needed: float) -> str:
    """passed, missed, or undecided: one case is missed of so few that the gate allows no miss at all.

    A gate of which no case is right is missed. needed: a share of cases below 1, or a median in dB, which one
    case does not decide.
    """
    if score.count and score.value >= needed - ROUNDING:
        return "passed"
    if not score.count or needed >= 1 or score.count >= enough_cases(needed):
        return "missed"
    return "undecided" if score.value and round(score.count * (1 - score.value)) == 1 else "missed"


def enough_cases(needed: float) -> int:
    """The least number of cases of which a share of `needed` allows that one is missed."""
    return math.ceil(1 / (1 - needed) - ROUNDING)


def verdict_of(gates: Sequence[Mapping[str, Any]], drawn: int, everything: int) -> dict[str, Any]:
    """The part of the report that follows from the gates. passed: none is missed."""
    passed = all(gate["outcome"] != "missed" for gate in gates)
    return {"gates": gates, "passed": passed, "notes": notes_of(gates, drawn, everything)}


def notes_of(gates: Sequence[Mapping[str, Any]], drawn: int, everything: int) -> list[str]:
    """What the verdict does not say by itself: how little so few cases can show."""
    notes = []
    if drawn < everything:
        notes.append(
            f"{drawn} of {everything} pictures were drawn, and the gates are set for all: what so few miss "
            "or pass says little. Leave --samples-per-type out for the verdict."
        )
    for gate in gates:
        if gate["outcome"] == "undecided":
            count, needed = gate["count"], gate["needed"]
            notes.append(
                f"{gate['name']} is undecided: 1 of {count} cases is missed, and {count} are too few for "
                f"{needed:g}, which allows 1 miss from {enough_cases(needed)} cases on"
            )
    return notes
