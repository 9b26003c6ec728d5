"""What is wrong with a body, as one refusal: each problem with its field, what was asked, the rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from portable_dit.refused_values import (
    MAPPINGS,
    MOST_NEAR,
    UNKNOWN,
    broken_rule,
    fields_of,
    has_value,
    held_by,
    place_of,
    shown,
)
from portable_dit.request import listed
from portable_dit.server.refusal import ApiError

MOST_NAMED = 100  # characters of a name that came from outside
NO_OBJECT = "The body must be a JSON object, sent with Content-Type: application/json."


@dataclass(frozen=True)
class _Problem:
    """What is wrong at one place. rules: one for each type that it may be of."""

    given: str
    way_out: str
    rules: list[str] = field(default_factory=list)

    def line(self, place: str) -> str:
        given = f"={self.given}" if self.given else ""
        return f"{place}{given}: {' or '.join(self.rules).rstrip('.')}.{self.way_out}"


def refused(problems: Mapping[str, str]) -> ApiError:
    """ApiError 400 that tells all problems, by their fields; of the whole body under an empty name."""
    return ApiError(400, listed(list(problems.values())), param=next(iter(problems)) or None)


def problems_of(
    errors: Sequence[Mapping[str, Any]], body: type[BaseModel] | None = None, *, under: str = ""
) -> dict[str, str]:
    """What pydantic found, by field.

    body: what the call takes, None where it is not known. under: where in the call's body that stands.
    """
    found: dict[str, _Problem] = {}
    around: set[str] = set()  # one type of a union takes what stands there, and what is wrong is inside it
    for number, error in enumerate(errors):
        if error["type"] == "json_invalid":
            reason = error.get("ctx", {}).get("error", "malformed")
            return {"": f"The body is not JSON ({reason}). Send a JSON object."}
        names, section = place_of(error, body)
        path = [under] * bool(under) + names
        if not path:
            return {"": NO_OBJECT}
        section = section if number < MOST_NEAR else None
        given = shown(error["input"]) if has_value(error) else ""
        way_out = "" if under else _way_out(error, path[-1], section)
        place = ".".join(path)[:MOST_NAMED] or "''"
        rules = found.setdefault(place, _Problem(given, way_out)).rules
        rule = _rule(error, path[-1], section)
        if rule not in rules:
            rules.append(rule)
        around |= {".".join(path[:length]) for length in range(1, len(path))}
    return {place: problem.line(place) for place, problem in found.items() if place not in around}


def _rule(error: Mapping[str, Any], name: str, section: type | None) -> str:
    if error["type"] in MAPPINGS:
        kind = None if section is None else held_by(section, name)[0]
        return "must be an object" + (f" with {', '.join(fields_of(kind))}" if kind else "")
    if error["type"] not in UNKNOWN:
        return broken_rule(error, section)
    if name == "extra_body":
        return "not a field of this call. What it holds stands beside the other fields here"
    return broken_rule(error, section, unknown="not a field of this call")


def _way_out(error: Mapping[str, Any], name: str, section: type | None) -> str:
    known = section.model_fields if section is not None and issubclass(section, BaseModel) else {}
    if not has_value(error) or name not in known or known[name].is_required():
        return ""
    return " Leave it out for the default."
