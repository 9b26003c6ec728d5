"""Machines as files: `Capabilities` in JSON, so that a plan can be made for a machine that is not this one.

portable-dit plan --recipe R --machine FILE
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from portable_dit.capabilities import Capabilities
from portable_dit.errors import UserError
from portable_dit.paths import read_at_most

MAX_BYTES = 256 * 1024


def load_machine(path: str | Path) -> Capabilities:
    """The capabilities in a JSON file. Raises UserError that lists every mistake in it."""
    try:
        text = read_at_most(path, MAX_BYTES)
    except OSError as error:
        raise UserError(f"machine {path}: the file cannot be read: {error.strerror}.") from error
    if len(text) > MAX_BYTES:
        raise UserError(f"machine {path}: over {MAX_BYTES:,} bytes; a machine file has less.")
    try:
        return _adapter().validate_json(text, strict=True)
    except ValidationError as error:
        lines = "\n".join(f"  {_place(item)}{_why(item)}" for item in error.errors(include_url=False))
        raise UserError(
            f"machine {path}: not a machine file. Copy one from tests/data/machines and change it.\n{lines}"
        ) from error


def dump_machine(machine: Capabilities) -> dict[str, Any]:
    """The capabilities as JSON-able data that `load_machine` reads back."""
    data: dict[str, Any] = _adapter().dump_python(machine, mode="json")
    for name in ("dtypes", "native_formats"):
        data[name] = sorted(data[name])
    return data


def _adapter() -> TypeAdapter[Capabilities]:
    return TypeAdapter(Capabilities)


def _place(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    return f"{key}: " if key else ""


def _why(item: Any) -> str:
    if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return "unknown key."
    return f"{item['msg']}."
