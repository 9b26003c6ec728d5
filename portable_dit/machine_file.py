"""Machines as files: `Capabilities` in JSON, so that a plan can be made for a machine that is not this one.

portable-dit plan --recipe R --machine NAME|FILE
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from portable_dit.capabilities import Capabilities
from portable_dit.errors import UserError, at_most, near
from portable_dit.paths import kind_of, read_at_most
from portable_dit.refused_values import mistakes

MAX_BYTES = 256 * 1024


def load_machine(ref: str | Path) -> Capabilities:
    """The capabilities in a JSON file, or of a machine that comes with the package, by name ("h200").

    Raises UserError that lists every mistake in it.
    """
    path = _find(ref)
    try:
        text = read_at_most(path, MAX_BYTES)
    except OSError as error:
        raise UserError(f"machine {ref}: the file cannot be read: {error.strerror}.") from error
    if len(text) > MAX_BYTES:
        raise UserError(f"machine {ref}: over {MAX_BYTES:,} bytes; a machine file has less.")
    try:
        return _adapter().validate_json(text, strict=True)
    except ValidationError as error:
        lines = at_most([f"  {mistake}" for mistake in mistakes(error, Capabilities)])
        raise UserError(f"machine {ref}: not a machine file. {_way_out()}\n{lines}") from error


def named_machines() -> dict[str, Path]:
    """Every machine that comes with the package, by name; in a checkout they lie among the tests' data."""
    package = Path(__file__).parent
    installed = package / "machines"
    folder = installed if installed.is_dir() else package.parent / "tests" / "data" / "machines"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def _find(ref: str | Path) -> Path:
    """The file that a path or a name means. Raises UserError that lists the names."""
    named, kind = named_machines(), kind_of(Path(ref))
    if kind not in ("missing", "folder"):
        return Path(ref)
    if str(ref) not in named:
        hint = near(str(ref), list(named), most=len(named)) if named else ""
        what = "neither a file nor a machine's name" if kind == "missing" else "a folder, not a file"
        raise UserError(f"machine {str(ref)!r}: {what}.{hint} {_way_out()}")
    return named[str(ref)]


def _way_out() -> str:
    like = next(iter(named_machines().values()), None)
    return f"For one of your own, copy {like or 'a machine file'}, change it and give its path."


def dump_machine(machine: Capabilities) -> dict[str, Any]:
    """The capabilities as JSON-able data that `load_machine` reads back."""
    data: dict[str, Any] = _adapter().dump_python(machine, mode="json")
    for name in ("dtypes", "native_formats"):
        data[name] = sorted(data[name])
    return data


def _adapter() -> TypeAdapter[Capabilities]:
    return TypeAdapter(Capabilities)
