"""What is wrong with a body, as one refusal: each problem with its field, what was asked, the rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from portable_dit.refused_values import (
    MAPPINGS,
    MOST_NEAR,
    UNKNOWN,
    broken_rule,
    fields_of,
    has_value,
    place_of,
    shown,
)
from portable_dit.refused_values import inside as fields_inside
from portable_dit.request import listed
from portable_dit.server.refusal import ApiError

MOST_NAMED = 100  # characters of a name that came from outside
NO_OBJECT = "The body must be a JSON object, sent with Content-Type: application/json."


def refused(problems: Mapping[str, str]) -> ApiError:
    """ApiError 400 that tells all problems, by their fields; of the whole body under an empty name."""
    return ApiError(400, listed(list(problems.values())), param=next(iter(problems)) or None)


def problems_of(
    errors: Sequence[Mapping[str, Any]], body: type[BaseModel] | None = None, *, inside: str = ""
) -> dict[str, str]:
    """What pydantic found, by field.

    body: what the call takes, None where it is not known. inside: where in the body that stands.
    """
    rules: dict[str, list[str]] = {}  # by field: where it may be of several types, one for each
    beside: dict[str, tuple[str, str]] = {}  # what was given, and the way out
    for number, error in enumerate(errors):
        if error["type"] == "json_invalid":
            reason = error.get("ctx", {}).get("error", "malformed")
            return {"": f"The body is not JSON ({reason}). Send a JSON object."}
        names, section = place_of(error, body)
        path = [inside] * bool(inside) + names
        if not path:
            return {"": NO_OBJECT}
        section = section if number < MOST_NEAR else None
        place = ".".join(path)[:MOST_NAMED] or "''"
        found = rules.setdefault(place, [])
        found += [rule for rule in [_rule(error, path[-1], section)] if rule not in found]
        given = f"={shown(error['input'])}" if has_value(error) else ""
        beside.setdefault(place, (given, "" if inside else _way_out(error, path[-1], section)))
    return {place: _line(place, *beside[place], found) for place, found in rules.items()}


def _line(place: str, given: str, way_out: str, rules: Sequence[str]) -> str:
    return f"{place}{given}: {' or '.join(rules).rstrip('.')}.{way_out}"


def _rule(error: Mapping[str, Any], name: str, section: type | None) -> str:
    if error["type"] in MAPPINGS:
        kind = None if section is None else fields_inside(section, name)[0]
        return "must be an object" + (f" with {', '.join(fields_of(kind))}" if kind else "")
    if error["type"] in UNKNOWN and name == "extra_body":
        return "not a field of this call. What it holds stands beside the other fields here"
    rule = broken_rule(error, section)
    return rule.replace("unknown key", "not a field of this call") if error["type"] in UNKNOWN else rule


def _way_out(error: Mapping[str, Any], name: str, section: type | None) -> str:
    known = section.model_fields if section is not None and issubclass(section, BaseModel) else {}
    if not has_value(error) or name not in known or known[name].is_required():
        return ""
    return " Leave it out for the default."
