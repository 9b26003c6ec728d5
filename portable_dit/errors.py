"""The error tree: everything that a user can cause derives from `PortableDitError`.

Every message says what was asked, the rule with its numbers, and the way out. `exit_code` is what the command
line returns: 2 the request or recipe is wrong, 3 it does not fit the machine, 1 something failed while
running.
"""

from __future__ import annotations

from collections.abc import Sequence


class PortableDitError(Exception):
    """Root of all errors that portable-dit raises on purpose."""

    exit_code = 1


class UserError(PortableDitError, ValueError):
    """Something that was asked for breaks a rule; nothing was loaded, drawn or written."""

    exit_code = 2


class RecipeError(UserError):
    """A recipe is unreadable, malformed, or holds wrong keys or values; lists all of them."""


class RequestError(UserError):
    """A prompt, size, step count, seed or reference that the model cannot take.

    problems: (field of the request, what is wrong with it), where that is known of each.
    """

    def __init__(self, message: str, problems: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class ImageError(RequestError):
    """A reference image that cannot be read safely or used."""


class WeightsError(UserError):
    """A checkpoint is missing, unreadable, or its tensors have wrong names, shapes, dtypes or values."""


class BackendError(UserError):
    """A backend, kernel or format that was named cannot be used here."""


class OutputError(UserError):
    """The place to write to is missing, not writable, or full."""


class DoesNotFitError(UserError):
    """The plan says that weights and activations exceed the memory of the machine."""

    exit_code = 3


class DeviceMemoryError(PortableDitError, MemoryError):
    """The device ran out of memory while running; says what was resident and which key would make it fit."""


class PictureError(PortableDitError):
    """What was drawn holds NaN or infinity, and so is no picture; says which stage made them, and in what."""


class RankError(PortableDitError):
    """One of several processes that draw together died, hung or failed; says which, and its last words."""


class CancelledError(PortableDitError):
    """A request that was stopped by whoever made it; nothing of it was written."""

    exit_code = 130


def at_most(lines: Sequence[str], most: int = 20) -> str:
    """The lines one below the other; of more than `most`, the first and how many are left out."""
    kept = list(lines[:most])
    if len(lines) > most:
        kept.append(f"and {len(lines) - most:,} more")
    return "\n".join(kept)


def near(name: str, known: list[str] | tuple[str, ...], most: int = 12, *, listed_by: str = "") -> str:
    """The half sentence for an unknown name: the nearest known one, if any, and all of them.

    Of more than `most`, those that are the least unlike, and how many are left out. listed_by: the command
    that names all; it stands in for them where there is a near one.
    """
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    if close and listed_by:
        return f"{hint} `{listed_by}` names all."
    shown = known if len(known) <= most else difflib.get_close_matches(name, known, n=most, cutoff=0.0)
    more = f", and {len(known) - len(shown):,} more" if len(shown) < len(known) else ""
    return f"{hint} Known: {', '.join(sorted(shown))}{more}."
