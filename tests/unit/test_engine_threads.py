"""One thread draws, whoever asks: on which one events, errors and Ctrl-C arrive, and what is left of it."""

import gc
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from portable_dit import Engine, Request
from portable_dit.result import Encoded, Stepped


@pytest.fixture
def blocks_run(engine):
    """The threads that ran the first block of the DiT, one entry for each time."""
    threads = []
    block = engine.workers.loaded.model.component("dit").blocks[0]
    hook = block.register_forward_hook(lambda *anything: threads.append(threading.get_ident()))
    yield threads
    hook.remove()


def test_one_thread_draws_whoever_asks_and_it_is_none_of_theirs(engine, blocks_run):
    """Two that compute would be two OpenMP teams on the same cores, and two states of every library."""
    engine.generate("a red apple")
    list(engine.stream("a red apple"))
    other = threading.Thread(target=engine.generate, args=("a red apple",))
    other.start()
    other.join()
    assert len(blocks_run) == 3 * 6
    assert len(set(blocks_run)) == 1
    assert threading.get_ident() not in blocks_run


def test_the_thread_that_loads_is_the_one_that_draws(tiny_recipe, shelf):
    shelf.install("threads", LOADING_THREAD)
    with Engine.load(tiny_recipe, {"device.backend": "threads"}) as loaded:
        drawing = []
        loaded.generate("a red apple", cancelled=lambda: drawing.append(threading.get_ident()))
        assert {loaded.setup.backend.loading_thread} == set(drawing)


LOADING_THREAD = """
import threading
from portable_dit.backend import API_VERSION
from portable_dit.cpu import CpuBackend
from portable_dit.hooks import hookimpl

class Backend(CpuBackend):
    id = "threads"
    api_version = API_VERSION

    def activate(self, device):
        self.loading_thread = threading.get_ident()

@hookimpl
def portable_dit_backends():
    return [Backend()]
"""


def test_events_are_told_on_the_thread_that_asked(engine):
    threads = set()
    engine.generate("a red apple", on_event=lambda event: threads.add(threading.get_ident()))
    assert threads == {threading.get_ident()}


def test_ctrl_c_is_raised_inside_a_step_and_the_engine_goes_on(engine, blocks_run):
    """Here in a block that takes very long, as those of large models do."""
    alone = engine.generate("a red apple").images[0].pixels
    block = engine.workers.loaded.model.component("dit").blocks[1]
    inside, go_on = threading.Event(), threading.Event()

    def take_long(*anything: object) -> None:
        inside.set()
        assert go_on.wait(60)

    def interrupt(event: object) -> None:
        if isinstance(event, Encoded):
            assert inside.wait(60)
            raise KeyboardInterrupt

    hook = block.register_forward_hook(take_long)
    with pytest.raises(KeyboardInterrupt):
        engine.generate("a red apple", on_event=interrupt)
    assert not go_on.is_set()
    go_on.set()
    hook.remove()
    assert np.array_equal(engine.generate("a red apple").images[0].pixels, alone)
    assert len(blocks_run) == 6 + 1 + 6, "of the drawing that nobody waits for, no other step was made"


def test_an_error_in_the_drawing_comes_with_the_lines_that_raised_it(engine):
    def fail(*anything: object) -> None:
        raise ArithmeticError("a block that fails")

    hook = engine.workers.loaded.model.component("dit").blocks[1].register_forward_hook(fail)
    try:
        with pytest.raises(ArithmeticError, match="a block that fails") as raised:
            engine.generate("a red apple")
    finally:
        hook.remove()
    assert {"fail", "denoise", "generate"} <= {entry.name for entry in raised.traceback}
    assert engine.generate("a red apple").images


def test_an_error_in_on_event_is_the_callers(engine, blocks_run):
    def fail(event: object) -> None:
        if isinstance(event, Stepped):
            raise LookupError("in the caller's own code")

    with pytest.raises(LookupError, match="own code"):
        engine.generate(Request("a red apple", images=100), on_event=fail)
    assert engine.generate("a red apple").images
    assert 6 < len(blocks_run) < 600, "what nobody waits for is not drawn to its end"


def test_an_engine_that_nobody_holds_leaves_no_thread(tiny_recipe):
    def drawing() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("drawing")}

    before = drawing()
    engine = Engine.load(tiny_recipe)
    (own,) = drawing() - before
    del engine
    gc.collect()
    own.join(60)
    assert not own.is_alive()


def test_a_fork_in_the_middle_of_a_drawing_is_told_that_the_engine_stayed_behind(tiny_recipe):
    code = f"""
import os, signal, threading, warnings
from portable_dit import Engine
from portable_dit.result import Started
warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks of processes with threads
engine = Engine.load({str(tiny_recipe)!r})
inside, go_on = threading.Event(), threading.Event()
def hold(event):
    if isinstance(event, Started):
        inside.set()
        go_on.wait(60)
other = threading.Thread(target=engine.generate, args=("a red apple",), kwargs=dict(on_event=hold))
other.start()
inside.wait(60)
if os.fork() == 0:
    signal.alarm(30)  # ends it where it waits
    try:
        engine.generate("a red apple")
    except Exception as error:
        print(error, flush=True)
    engine.close()
    os._exit(0)
os.wait()
go_on.set()
other.join()
print(len(engine.generate("a red apple").images))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    told, drawn = done.stdout.splitlines()
    assert "another process loaded this engine" in told
    assert drawn == "1"


def test_two_threads_share_an_engine_and_get_their_own_pictures(engine):
    prompts = ["a red apple", "a green apple"]
    alone = {prompt: engine.generate(prompt).images[0].pixels for prompt in prompts}
    got = {}

    def draw(prompt):
        got[prompt] = engine.generate(prompt).images[0].pixels

    threads = [threading.Thread(target=draw, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(got[prompt], alone[prompt]) for prompt in prompts)


def test_torch_threads_and_grad_mode_are_left_alone(engine):
    before = torch.get_num_threads()
    engine.generate("a red apple")
    assert torch.get_num_threads() == before
    assert torch.is_grad_enabled()


def test_as_many_threads_compute_as_the_caller_has(engine):
    """torch keeps the number for each thread: what a program sets is said on its own, not on the engine's."""
    seen = []
    block = engine.workers.loaded.model.component("dit").blocks[0]
    hook = block.register_forward_hook(lambda *anything: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    try:
        for threads in (before + 1, before):
            torch.set_num_threads(threads)
            engine.generate("a red apple")
    finally:
        hook.remove()
        torch.set_num_threads(before)
    assert seen == [before + 1] * 6 + [before] * 6
