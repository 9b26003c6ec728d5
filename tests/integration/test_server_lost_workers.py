"""A request that kills each worker before its drawing has begun: it ends, and those beside it do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_process import RunningServer, eventually, running

# Of a size that is not the usual one, a plan is made before the drawing begins.
BRITTLE = """
import os, signal, sys
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
    with running(recipe, tmp_path / "jobs.sqlite3", *flags, PYTHONPATH=str(shelf.folder)) as server:
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
