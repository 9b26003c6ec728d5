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

    _on_interrupt(_interrupt)
    try:
        run()
    except KeyboardInterrupt:  # while the commands were put together, before one could tell of it
        os._exit(INTERRUPTED)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            os._exit(INTERRUPTED)  # Python would wait for the thread that draws, to the end of its step
        raise
    finally:
        _on_interrupt(_leave)


def _on_interrupt(handler: Callable[[int, FrameType | None], object]) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored for jobs in the background: so be it
        signal.signal(signal.SIGINT, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """KeyboardInterrupt, but not into the import of a library: some (torch 2.13) abort, or import half."""
    here = frame
    while here is not None:
        if here.f_code.co_filename == "<frozen importlib._bootstrap>":
            shows_cursor = b"\x1b[?25h" if os.isatty(2) else b""  # a progress line may have hidden it
            os.write(2, shows_cursor + b"interrupted\n")
            os._exit(INTERRUPTED)
        here = here.f_back
    signal.default_int_handler(number, frame)


if __name__ == "__main__":
    main()
