"""Why a value that came from outside is refused, in our words: for recipes, machines, suites and requests.

Pydantic finds what is wrong; what it says of it is for programmers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

from portable_dit.errors import near

MOST_SHOWN = 60  # characters of a value
MOST_NEAR = 40  # errors of one body that are told the near names: looking for them takes a millisecond
MAPPINGS = ("model_type", "model_attributes_type", "dict_type", "dataclass_type")
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
NO_VALUE = ("string_too_short", "value_error", "json_invalid")
MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
RULES = {
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "greater_than": "must be above {gt}",
    "less_than": "must be below {lt}",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "has too many digits",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "path_type": "must be a path",
    "string_unicode": "holds half a character, and must be whole text",
    "string_too_long": "must have at most {max_length} characters",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "set_type": "must be a list",
    "frozen_set_type": "must be a list",
    "too_long": "has {actual_length} entries and may have {max_length}",
    "too_short": "has {actual_length} entries and must have {min_length} or more",
    "none_required": "must be null",
    "recursion_loop": "is nested too deeply",
}


def shown(value: object) -> str:
    """A value as JSON and YAML write it, cut where it is long."""
    if isinstance(value, str | bytes):
        value = value[: MOST_SHOWN + 1]  # spelled out, the rest could be megabytes
    try:
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    except ValueError:  # Python writes no number of over 4,300 digits
        text = "a number of very many digits"
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def has_value(item: Mapping[str, Any]) -> bool:
    """Whether an error of pydantic's is about a value, and not about a name that is unknown or missing."""
    return item["type"] not in (*UNKNOWN, *MISSING, *NO_VALUE)


def broken_rule(item: Mapping[str, Any], section: type | None = None, *, unknown: str = "unknown key") -> str:
    """The rule behind an error of pydantic's, to be read after the value.

    section: see `place_of`. unknown: what is said of a name that is no field of it.
    """
    kind, facts = str(item["type"]), {k: _short(v) for k, v in item.get("ctx", {}).items()}
    if kind in UNKNOWN:
        name = str(item["loc"][-1])[:MOST_SHOWN]
        return unknown + (f".{near(name, fields_of(section))}" if section else "")
    if kind in MISSING:
        return "missing"
    if kind == "literal_error":
        options = str(facts["expected"]).replace(" or ", ", ")
        return f"is not one of {options.replace('True', 'true').replace('False', 'false')}"
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "json_invalid":
        return f"not JSON ({facts['error']})"
    if kind in MAPPINGS:
        return "must be a mapping of `key: value` lines"
    if kind == "too_long" and facts["actual_length"] is None:  # pydantic counts no mapping that is too long
        facts["actual_length"] = len(item["input"])
    if kind in RULES:
        return RULES[kind].format(**facts)
    return str(item["msg"]).removeprefix("Value error, ")


def _short(limit: object) -> object:
    """A limit without the decimals that say nothing."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit


def why_refused(item: Mapping[str, Any], section: type | None = None) -> str:
    """What was given and the rule that it breaks, as in `0 must be at least 1`."""
    rule = broken_rule(item, section)
    return f"{shown(item['input'])} {rule}" if has_value(item) else rule


def mistakes(error: ValidationError, body: type) -> list[str]:
    """Every error of a file's data, as in `types.first.0.seed: -1 must be at least 0`."""
    found = []
    for number, item in enumerate(error.errors(include_url=False)):
        names, section = place_of(item, body)
        section = section if number < MOST_NEAR else None
        found.append(": ".join([".".join(names)] * bool(names) + [why_refused(item, section)]))
    return found


def place_of(item: Mapping[str, Any], body: type | None) -> tuple[list[str], type | None]:
    """The names on the way to what is wrong, and the section of a body that holds the last of them.

    body: a model of pydantic's or a dataclass, None where it is not known. The branches of a union stand
    among pydantic's names and are no fields.
    """
    names: list[str] = []
    section, within, by_key = body, body, False
    for part in item["loc"]:
        if by_key and isinstance(part, str):
            by_key = False
        elif isinstance(part, str):
            known = within is not None and part in fields_of(within)
            if body is not None and not known and (within is None or item["type"] not in UNKNOWN):
                continue  # a branch, or a name in something whose fields are not known
            section = within
            within, by_key = held_by(section, part) if section is not None and known else (None, False)
        names.append(str(part))
    return names, section


def fields_of(section: Any) -> tuple[str, ...]:
    """The names of its fields."""
    if issubclass(section, BaseModel):
        return tuple(section.model_fields)
    return tuple(field.name for field in dataclasses.fields(section))


@lru_cache
def _hints(section: type) -> dict[str, Any]:
    return get_type_hints(section)


def held_by(section: type, name: str) -> tuple[type | None, bool]:
    """What a field holds, when that has fields of its own, and whether it holds that by keys."""
    waiting, by_key = [_hints(section).get(name)], False
    while waiting:
        kind = waiting.pop(0)
        if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, BaseModel)):
            return kind, by_key
        by_key = by_key or get_origin(kind) in (dict, Mapping)
        waiting += get_args(kind)
    return None, by_key
