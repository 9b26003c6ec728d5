"""The process of `portable-dit`, and of `python -m portable_dit`: Ctrl-C is quiet at any moment of it.

A command tells that it was interrupted. Before, while its modules are imported, and behind it, there is
nothing to tell and nothing to tidy up, and Python would show where in its files the key was hit; so there it
ends the process at once.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # as type checkers know it; typing takes longer to import than the rest of this file
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, as shells say it


def main() -> None:
    """Runs the command line."""
    _on_interrupt(_leave)
    from portable_dit.cli import main as run  # most of the start-up time

    _on_interrupt(signal.default_int_handler)
    try:
        run()
    finally:
        _on_interrupt(_leave)


def _on_interrupt(handler: Callable[[int, FrameType | None], object]) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored for jobs in the background: so be it
        signal.signal(signal.SIGINT, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
