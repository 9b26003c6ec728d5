"""How far a drawing is, as the thread that draws sees it: what is told of its steps is heard later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from portable_dit import Engine


@contextmanager
def steps_drawn(engine: Engine) -> Iterator[list[None]]:
    """A list with an entry for each step of each picture that this engine draws from now on."""
    drawn: list[None] = []
    head = engine.workers.loaded.model.component("dit").final_layer
    hook = head.register_forward_hook(lambda *anything: drawn.append(None))
    try:
        yield drawn
    finally:
        hook.remove()
