"""What one process of several does wrong: one clear error that names it, nothing left, and the next request
draws again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from portable_dit import Engine, Request
from portable_dit.errors import CancelledError, PictureError, RankError, RequestError
from portable_dit.result import Finished, Stepped

TWO = {"layout.ulysses": 2, "layout.vae_tiles": 2}
PATIENCE = 120  # seconds that any of this may take on a busy machine
# A device whose rank 1 does what a file says, once, in the third step.
FAULTY = """
import os, signal, time
from pathlib import Path
import torch.distributed as dist
from portable_dit.cpu import CpuBackend
from portable_dit.hooks import hookimpl

class Faulty(CpuBackend):
    id = "faulty"
    calls = 0
    def synchronize(self, device):
        wish = Path({file!r})
        if wish.exists() and dist.is_initialized() and dist.get_rank() == 1:
            self.calls += 1
            if self.calls == 4:
                fault = wish.read_text()
                wish.unlink()
                print("about to", fault, flush=True)
                if fault == "raise":
                    raise ValueError("the moon is in the wrong house")
                if fault == "exit":
                    os._exit(7)
                time.sleep(1000)

@hookimpl
def portable_dit_backends():
    return [Faulty()]
"""


@pytest.fixture(scope="module")
def alone(tiny_recipe):
    """The picture of one process."""
    with Engine.load(tiny_recipe) as engine:
        return engine.generate(Request("a red apple")).images[0].pixels


@pytest.fixture(scope="module")
def engine(tiny_recipe):
    """Two ranks for tests that leave them at work, though perhaps others than they found."""
    with Engine.load(tiny_recipe, TWO) as loaded:
        yield loaded


def gone(pids: list[int]) -> bool:
    """Whether none of these processes is there any more, soon."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


MANY = Request("a red apple", images=100)  # the ranks may be pictures ahead of what a busy caller has heard


def at_step(number, action):
    def watch(event):
        if isinstance(event, Stepped) and event.step == number:
            action()

    return watch


def test_a_rank_that_is_killed_in_step_three_is_named_and_the_next_request_draws_again(
    tiny_recipe, alone, capfd
):
    with Engine.load(tiny_recipe, TWO) as engine:
        pids = [report.process for report in engine.reports]
        start = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1 of 2 was killed by SIGKILL while drawing") as caught:
            engine.generate(MANY, on_event=at_step(2, lambda: kill(pids[1])))
        assert str(caught.value).endswith("All ranks were ended; the next request starts them again.")
        assert time.monotonic() - start < PATIENCE
        assert gone(pids)
        again = engine.generate("a red apple").images[0].pixels
        assert np.array_equal(again, alone)
        fresh = [report.process for report in engine.reports]
        assert not set(fresh) & set(pids)
        os.kill(fresh[0], signal.SIGKILL)
        told = wait_for(capfd, "[rank 0] was killed by SIGKILL\n")
    assert gone(fresh)
    told += capfd.readouterr().err
    deaths = [line for line in told.splitlines() if "was killed" in line]
    assert deaths == ["[rank 1] was killed by SIGKILL", "[rank 0] was killed by SIGKILL"]


def test_of_replicas_the_one_that_fails_is_said_to_be_ended(tiny_recipe, alone):
    with Engine.load(tiny_recipe, {"layout.data": 2}) as engine:
        pids = [report.process for report in engine.reports]
        halves = set()

        def kill_one_of_two_at_work(event):
            """A rank that is lost before it has said anything is started again, and nobody notices."""
            if isinstance(event, Stepped):
                halves.add(event.image < MANY.images // 2)
                if len(halves) == 2:
                    kill(pids[1])

        with pytest.raises(RankError, match=r"rank 1 of 2 was killed by SIGKILL while drawing") as caught:
            engine.generate(MANY, on_event=kill_one_of_two_at_work)
        assert "All ranks were ended" not in str(caught.value)
        assert str(caught.value).endswith("the other replicas go on.")
        assert np.array_equal(engine.generate("a red apple").images[0].pixels, alone)
        assert engine.reports[0].process == pids[0]


def kill(pid: int) -> None:
    """Also of one that is gone already: more is told of what it drew."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_for(capfd, line: str) -> str:
    """What was written on stderr up to a line that is awaited."""
    told, deadline = "", time.monotonic() + PATIENCE
    while line not in told:
        assert time.monotonic() < deadline, told
        time.sleep(0.02)
        told += capfd.readouterr().err
    return told


def test_a_rank_that_is_stopped_is_given_up_and_named(tiny_recipe):
    with Engine.load(tiny_recipe, {**TWO, "rank_timeout_seconds": 3.0}) as engine:
        pids = [report.process for report in engine.reports]
        with pytest.raises(RankError, match=r"rank 1 of 2 does not answer for 3 s while drawing"):
            engine.generate(MANY, on_event=at_step(2, lambda: os.kill(pids[1], signal.SIGSTOP)))
        assert gone(pids)


@pytest.fixture
def faulty(shelf, tmp_path, tiny_recipe):
    """An engine on a device whose rank 1 fails as a file says, once; and that file."""
    wish = tmp_path / "fault"
    shelf.install("faulty", FAULTY.format(file=str(wish)))

    def load(**overrides):
        return Engine.load(tiny_recipe, {**TWO, "device.backend": "faulty", **overrides})

    return load, wish


FAULTS = {
    "raise": "rank 1 of 2 failed while drawing: ValueError: the moon is in the wrong house",
    "exit": "rank 1 of 2 ended with exit code 7 while drawing",
    "hang": "rank 1 of 2 makes no progress for 3 s while drawing",
}


def test_the_rank_that_fails_is_named_with_its_last_words_each_time_anew(faulty, alone, capfd):
    load, wish = faulty
    with load(rank_timeout_seconds=3.0) as engine:
        for fault, said in FAULTS.items():
            pids = [report.process for report in engine.reports]
            wish.write_text(fault)
            with pytest.raises(RankError) as caught:
                engine.generate("a red apple")
            assert said in str(caught.value)
            assert f"about to {fault}" in str(caught.value)
            if fault == "hang":
                assert "rank 0 in" in str(caught.value)
            assert gone(pids)
            assert np.array_equal(engine.generate("a red apple").images[0].pixels, alone)
    told = capfd.readouterr().err
    assert all(f"[rank 1] about to {fault}" in told for fault in FAULTS)


def test_a_request_that_all_ranks_refuse_or_stop_costs_no_rank(engine, alone):
    pids = [report.process for report in engine.reports]
    with pytest.raises(RequestError, match="at most"):
        engine.generate("apple " * 70)
    seen = []
    with pytest.raises(CancelledError, match="cancelled"):
        engine.generate(MANY, on_event=seen.append, cancelled=lambda: len(seen) > 4)
    assert not any(isinstance(event, Finished) for event in seen)
    assert np.array_equal(engine.generate("a red apple").images[0].pixels, alone)
    assert [report.process for report in engine.reports] == pids


def test_weights_that_are_wrong_are_told_once_and_leave_no_process(tiny_recipe, tiny_checkpoint, tmp_path):
    folder = tmp_path / "cut"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "manifest.json").unlink()
    weights = folder / "transformer" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    before = children()
    with pytest.raises(Exception, match="cut short"):
        Engine.load(tiny_recipe, {**TWO, "weights": str(folder)})
    assert children() == before


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_whoever_ends_the_caller_ends_the_ranks(tiny_recipe, tmp_path, sent, code):
    command = [sys.executable, "-m", "portable_dit", "run", "--recipe", str(tiny_recipe), "--usp", "2"]
    command += ["--prompt", "a red apple", "-n", "128", "-o", str(tmp_path / "apple.png")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().endswith("apple-001.png\n")
    ranks = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(ranks) == 2
    process.send_signal(sent)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert "Traceback" not in said
    assert gone(ranks)


def test_two_engines_side_by_side_do_not_collide_and_one_that_ends_leaves_the_other(
    engine, tiny_recipe, alone
):
    with Engine.load(tiny_recipe, TWO) as other:
        for each in (engine, other, engine):
            assert np.array_equal(each.generate("a red apple").images[0].pixels, alone)
        pids = [report.process for report in other.reports]
    assert gone(pids)
    assert np.array_equal(engine.generate("a red apple").images[0].pixels, alone)


def test_the_command_line_says_what_each_rank_loaded(tiny_recipe, tmp_path):
    command = [sys.executable, "-m", "portable_dit", "run", "--recipe", str(tiny_recipe), "--json"]
    command += ["--tensor-parallel-size", "2", "--prompt", "a red apple", "-o", str(tmp_path / "apple.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE * 2)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["images"]
    lines = [line for line in done.stderr.splitlines() if line.startswith("rank ")]
    assert [line.split(":")[0] for line in lines] == ["rank 0", "rank 1"]
    assert all("MB of weights" in line for line in lines)


def test_a_picture_that_is_no_number_is_the_same_error_on_every_rank(tiny_recipe, tiny_checkpoint, tmp_path):
    """Though one rank alone has it decoded. The ranks go on, as after any error that all of them agree on."""
    weights = shutil.copytree(tiny_checkpoint, tmp_path / "weights")
    (weights / "manifest.json").unlink()
    stored = load_file(weights / "vae" / "model.safetensors")
    stored["decoder.proj_out.weight"] = torch.full_like(stored["decoder.proj_out.weight"], 3e38)
    save_file(stored, weights / "vae" / "model.safetensors")
    with Engine.load(tiny_recipe, {"layout.ulysses": 2, "weights": str(weights)}) as engine:
        pids = [report.process for report in engine.reports]
        for _ in range(2):
            with pytest.raises(PictureError, match="out of the vae holds NaN or infinity"):
                engine.generate(Request("a red apple", images=2))
        assert [report.process for report in engine.reports] == pids
        assert all(psutil.pid_exists(pid) for pid in pids)
