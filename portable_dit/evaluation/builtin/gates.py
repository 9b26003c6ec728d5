"""The gates of h3-mini for pictures that a server draws; what `portable-dit eval --suite builtin` runs.

Text to image is gate C, edits with one reference are gate D.
"""

from __future__ import annotations

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
        "gates": gates,
        "passed": all(gate["passed"] for gate in gates),
        "notes": notes_of(gates, len(some), everything),
        "scores": {name: vars(score) for name, score in scores.items() if score.count},
    }


def gates_of(scores: dict[str, Score]) -> list[dict[str, Any]]:
    """Every gate with what was measured; one without a case for it is not passed."""
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
            "passed": bool(scores[name].count and scores[name].value >= least - ROUNDING),
        }
        for name, least in needed.items()
    ]


def notes_of(gates: Sequence[Mapping[str, Any]], drawn: int, everything: int) -> list[str]:
    """What the verdict does not say by itself: how little so few cases can show."""
    notes = []
    if drawn < everything:
        notes.append(
            f"{drawn} of {everything} pictures were drawn, and the gates are set for all: what so few miss "
            "or pass says little. Leave --samples-per-type out for the verdict."
        )
    strict = [
        f"{gate['name']} ({gate['count']} cases)"
        for gate in gates
        if not gate["passed"] and gate["needed"] < 1 and gate["count"] * (1 - gate["needed"]) < 1
    ]
    if strict:
        notes.append(f"of so few cases none may be missed, which one of them decides: {', '.join(strict)}")
    return notes
