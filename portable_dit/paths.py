"""What lies at a path, asked in one way: no name, however odd, makes the question itself fail.

`pathlib`'s own questions raise for a name that is too long, for a NUL byte, and behind a folder that may not
be entered; who asks them with what a person typed shows that person a traceback.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from portable_dit.errors import WeightsError

Kind = Literal["file", "folder", "other", "hidden", "missing"]


def kind_of(path: str | Path) -> Kind:
    """What there is, links followed. other: a device or pipe. hidden: the system does not let us look.

    missing: also for a text that cannot be a path.
    """
    try:
        mode = os.stat(path).st_mode
    except PermissionError:
        return "hidden"
    except (OSError, ValueError):
        return "missing"
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else "other"


@contextmanager
def told_what_is_hidden() -> Iterator[None]:
    """Around what reads weights: a file or folder of them that may not be read is a WeightsError."""
    try:
        yield
    except PermissionError as error:
        raise WeightsError(
            f"{error.filename}: may not be read ({error.strerror}). Change its mode and that of its folders, "
            "or copy what it belongs to."
        ) from error


def expanded(path: str) -> Path:
    """The path with ~ as the home folder; as it is where it names a user who is not here."""
    return Path(os.path.expanduser(path))


def read_at_most(path: str | Path, most_bytes: int) -> bytes:
    """The content, or its first most_bytes + 1 bytes, since a device may never end. Raises OSError."""
    if "\0" in str(path):
        raise FileNotFoundError(2, "a name cannot hold NUL", str(path))
    with open(path, "rb") as file:
        return file.read(most_bytes + 1)
