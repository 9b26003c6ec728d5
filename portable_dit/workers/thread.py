"""The thread that a model lives on, in a process that draws: there it is loaded, and there it draws.

Whoever asks, from whichever thread, the same one computes, since OpenMP and vendors' libraries keep state for
every thread that does. OpenMP keeps a team of threads for each, and two teams on the same cores hold each
other up: h3-mini at 256x256 was denoised in 118 ms where one thread had drawn before and another drew, and in
73 ms where one did all (docs/benchmarks/server.md). An accelerator's libraries keep a current device,
handles and workspaces for each.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

from portable_dit.errors import CancelledError

T = TypeVar("T")
Tell = Callable[..., None]


class DrawingThread:
    """One thread, which does one call after the other."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="drawing")

    def call(self, work: Callable[[Tell], T]) -> T:
        """What the work gives, done on the thread with as many threads of torch's as the caller has.

        work is given `tell`: tell(f, *arguments) has f called on the caller's thread, soon, and waits for
        nothing. What the work raises is raised here. When f raises, or Ctrl-C comes, that is raised here at
        once, and the work is ended by a CancelledError when it next tells something.
        """
        told: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        left = threading.Event()
        threads = torch.get_num_threads()

        def tell(function: Callable[..., None], *arguments: Any) -> None:
            if left.is_set():
                raise CancelledError("whoever asked for this has left.")
            told.put(partial(function, *arguments))

        def do() -> T:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            return work(tell)

        done = self._pool.submit(do)
        done.add_done_callback(lambda done: told.put(None))
        try:
            while (function := told.get()) is not None:
                function()
            return done.result()
        finally:
            left.set()
            done.cancel()
            del done  # else an error would hold itself, and the tensors of its lines, through this frame

    def end(self) -> None:
        """Ends the thread when it has nothing left to do."""
        self._pool.shutdown()
