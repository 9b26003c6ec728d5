"""What reaches the terminal: streams that may be closed, and text that may come from anybody."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import typer

# All but line end and tab, what turns the direction of writing, and halves of characters.
CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")


def prepare_streams() -> None:
    """Opens stdin, stdout and stderr that the caller had closed, as files that hold and keep nothing.

    Otherwise Python has None there, and the next file that is opened, such as a picture, gets the number
    that C libraries print their warnings to.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the system gives the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        codecs.register_error("as_bytes_or_spelled", _as_bytes_or_spelled)
        sys.stdout.reconfigure(errors="as_bytes_or_spelled")


def _as_bytes_or_spelled(error: UnicodeError) -> tuple[str | bytes, int]:
    """A file's name of any bytes goes out as those bytes; a letter that the terminal has not, spelled out."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


def tell(text: str) -> None:
    """A message for people, on stderr; a stderr that cannot be written changes nothing else."""
    with contextlib.suppress(OSError):
        typer.echo(printable(text), err=True)


def as_json(data: Any) -> str:
    """One line of JSON with what was measured: fractions have seven digits, and clocks know no more.

    Not for what is to be read back exactly, such as a recipe's values.
    """
    return json.dumps(_rounded(data))


def _rounded(data: Any) -> Any:
    if isinstance(data, float):
        return float(f"{data:.7g}")
    if isinstance(data, Mapping):
        return {key: _rounded(value) for key, value in data.items()}
    return [_rounded(value) for value in data] if isinstance(data, list | tuple) else data


def printable(text: str) -> str:
    """The text with control characters spelled out, which could move the cursor or recolour the terminal."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
