"""Who goes along when a worker dies of a request, or with its server; and who does not."""

from __future__ import annotations

import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from server_process import RunningServer, alive, eventually, running

# Of a size that is not the usual one, a plan is made before the drawing begins.
BRITTLE = """
import os, signal, sys, time
from portable_dit.cpu import CpuBackend
from portable_dit.hooks import hookimpl

class Brittle(CpuBackend):
    id = "brittle"
    def kernel_lists(self):
        prompt = getattr(sys._getframe(1).f_locals.get("request"), "prompt", "")
        if prompt == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt == "raise":
            raise ValueError("the moon is in the wrong house")
        if prompt == "garble":
            os.write(int(sys.argv[1]), bytes([0, 0, 0, 4]) + b"junk")  # the server expects a pickle
            time.sleep(1000)
        return super().kernel_lists()

@hookimpl
def portable_dit_backends():
    return [Brittle()]
"""
LONG = {"prompt": "a red apple", "size": "512x512", "n": 128}
SHAPE = {"size": "256x256"}  # of those that are drawn side by side
MANY = 24


@pytest.fixture
def recipe(make_slow_recipe, shelf, tmp_path: Path) -> Path:
    """Draws on a device that dies of some prompts, and side by side all that a test asks for."""
    shelf.install("brittle", BRITTLE)
    text = make_slow_recipe(batch=MANY + 1).read_text()
    path = tmp_path / "brittle.yaml"
    path.write_text(text.replace("backend: cpu", "backend: brittle"))
    return path


def submit(server: RunningServer, body: dict) -> str:
    answer = server.post("/v1/jobs", body)
    assert answer.status == 202, answer.body
    return answer.json["id"]


def job(server: RunningServer, id: str) -> dict:
    return server.get(f"/v1/jobs/{id}").json


def wait_for(server: RunningServer, id: str, *states: str) -> dict:
    return eventually(lambda: (found := job(server, id))["status"] in states and found, f"{id} is {states}")


def worker(server: RunningServer) -> dict:
    return server.get("/server_info").json["workers"][0]


@pytest.mark.parametrize(
    ("poison", "replicas", "why"),
    [
        ("kill", 2, "2 ended before they began this request, the last with exit code -9."),
        ("raise", 1, "ValueError: the moon is in the wrong house."),
    ],
)
def test_who_kills_two_workers_before_it_is_begun_is_told_and_takes_nobody_along(
    recipe, shelf, tmp_path, poison, replicas, why
):
    flags = ("--set", f"layout.data={replicas}", "--max-images", "128")
    with running(recipe, tmp_path / "jobs.sqlite3", *flags, **shelf.environment) as server:
        before = [submit(server, LONG) for _ in range(replicas)]  # every place is taken
        wait_for(server, before[0], "running")
        mate = submit(server, {"prompt": "a red apple", "n": MANY, **SHAPE})
        guilty = submit(server, {"prompt": poison, **SHAPE})
        for id in before:
            server.post(f"/v1/jobs/{id}/cancel")
        eventually(lambda: worker(server)["starts"] == 2, "both were taken together, and the worker is lost")
        wait_for(server, mate, "running", "finished", "failed")
        behind = submit(server, {"prompt": "a green apple", "size": "64x64"})
        error = wait_for(server, guilty, "failed", "finished")["error"]
        assert error["code"] == "worker_lost"
        assert error["message"] == f"The worker was lost: {why} Another is being started; try again."
        assert job(server, mate)["status"] == "finished", (
            "it was alone with the second worker, and comes first"
        )
        wait_for(server, behind, "finished")
        assert worker(server)["starts"] == 3


def test_a_worker_that_says_what_nobody_can_read_is_replaced(recipe, shelf, tmp_path):
    with running(recipe, tmp_path / "jobs.sqlite3", **shelf.environment) as server:
        guilty = submit(server, {"prompt": "garble", **SHAPE})
        eventually(lambda: worker(server)["starts"] == 2, "another is started")
        server.post(f"/v1/jobs/{guilty}/cancel")


LOADS_FOR_EVER = """
import time
from portable_dit.cpu import CpuBackend
from portable_dit.hooks import hookimpl

class LoadsForEver(CpuBackend):
    id = "for_ever"
    def synchronize(self, device):
        print("loads for ever", flush=True)
        time.sleep(1000)

@hookimpl
def portable_dit_backends():
    return [LoadsForEver()]
"""


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_server_that_is_killed_takes_along_a_worker_that_loads(shelf, tiny_recipe, tmp_path, replicas):
    """And its ranks, all in the middle of something that may take minutes, or for ever."""
    shelf.install("for_ever", LOADS_FOR_EVER)
    recipe = tmp_path / "for_ever.yaml"
    recipe.write_text(tiny_recipe.read_text().replace("backend: cpu", "backend: for_ever"))
    flags = ("--set", f"layout.data={replicas}")
    with running(recipe, tmp_path / "jobs", *flags, wait=False, **shelf.environment) as server:
        eventually(lambda: sum("loads for ever" in line for line in server.log) == replicas, "it loads")
        pids = [child.pid for child in psutil.Process(server.process.pid).children(recursive=True)]
        assert len(pids) == (1 if replicas == 1 else 3)
        server.process.kill()
        try:
            eventually(lambda: not any(map(alive, pids)), "nothing is left of it", 30)
        finally:
            for pid in filter(alive, pids):
                os.kill(pid, signal.SIGKILL)


def test_a_worker_that_cannot_be_started_for_a_while_is_started_later(tiny_recipe, tmp_path):
    """A limit on open files stands for a system that has none left, or no process."""
    with running(tiny_recipe, tmp_path / "jobs") as server:
        pid, worker = server.process.pid, server.worker_pid
        usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, usual[1]))
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: any("worker: cannot be started" in line for line in server.log), "it is told")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)
        server.wait_ready()
        assert server.draw(size="64x64").status == 200
        assert server.stop() == 0


FAILS_LATE = """
import time
from pathlib import Path
from portable_dit.cpu import CpuBackend
from portable_dit.errors import RecipeError
from portable_dit.hooks import hookimpl

class FailsLate(CpuBackend):
    id = "late"
    def synchronize(self, device):
        while not Path({file!r}).exists():
            time.sleep(0.01)
        raise RecipeError("late: there is no such device any more.")

@hookimpl
def portable_dit_backends():
    return [FailsLate()]
"""


def test_who_waits_for_a_model_that_cannot_be_loaded_is_told(shelf, tiny_recipe, tmp_path):
    shelf.install("late", FAILS_LATE.format(file=str(tmp_path / "now")))
    recipe = tmp_path / "late.yaml"
    recipe.write_text(tiny_recipe.read_text().replace("backend: cpu", "backend: late"))
    with (
        running(recipe, tmp_path / "jobs", wait=False, **shelf.environment) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        waits = pool.submit(server.draw)
        eventually(lambda: server.get("/server_info").json["queue"]["waiting"], "it waits")
        (tmp_path / "now").touch()
        answer = waits.result(60)
        assert (answer.status, answer.error["code"]) == (503, "draining")
        assert server.process.wait(60) == 2
    assert any("there is no such device any more" in line for line in server.log)
