"""Requests that the server has drawn side by side: each keeps its pictures, its progress and its own end."""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server_load import expected_digests, kinds, load
from server_process import RunningServer, eventually, running

from portable_dit.engine import Engine
from portable_dit.request import Request

BLOCKER = {"prompt": "make it green", "size": "256x256", "n": 128}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # with more, a batch changes bits at some sizes and is not drawn as one
GROUP = 4  # requests of so many pictures make up a batch
PICTURES = 8


@pytest.fixture(scope="module")
def recipe(make_slow_recipe) -> Path:
    return make_slow_recipe(batch=GROUP * PICTURES)


@pytest.fixture(scope="module")
def server(recipe: Path, tmp_path_factory) -> Iterator[RunningServer]:
    jobs = tmp_path_factory.mktemp("server") / "jobs.sqlite3"
    with running(recipe, jobs, "--max-images", "128", **ONE_THREAD) as server:
        yield server
    assert "Traceback" not in "".join(server.log)


@pytest.fixture(scope="module")
def alone(recipe: Path) -> Iterator[Engine]:
    with Engine.load(recipe, {"batch": 1}) as engine:
        yield engine


def status(server: RunningServer, id: str) -> str:
    return server.get(f"/v1/jobs/{id}").json["status"]


def drawing(server: RunningServer) -> list[str]:
    return server.get("/server_info").json["workers"][0]["drawing"]


def metrics(server: RunningServer) -> dict[str, float]:
    lines = server.get("/metrics").body.decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}


def submitted(server: RunningServer, count: int = GROUP, **fields: object) -> list[str]:
    """Jobs that begin together: they waited behind another one."""
    blocker = server.post("/v1/jobs", BLOCKER).json["id"]
    eventually(lambda: status(server, blocker) == "running", "the worker is busy")
    wish = {"prompt": "a red apple", "size": "512x512", "n": PICTURES, **fields}
    ids = [server.post("/v1/jobs", {**wish, "seed": 100 * k}).json["id"] for k in range(count)]
    server.post(f"/v1/jobs/{blocker}/cancel")
    eventually(lambda: all(status(server, id) != "queued" for id in ids), "they were taken")
    return ids


def stepped(server: RunningServer, id: str) -> int:
    return server.get(f"/v1/jobs/{id}").json.get("step", 0)


def files(server: RunningServer, id: str) -> list[bytes]:
    result = server.get(f"/v1/jobs/{id}/result").json
    return [base64.b64decode(item["b64_json"]) for item in result["data"]]


def expected(alone: Engine, k: int, **wishes: object) -> list[bytes]:
    request = Request(
        "a red apple", seed=100 * k, format="png", **{"size": (512, 512), "images": PICTURES} | wishes
    )
    return [picture.encoded["png"] for picture in alone.generate(request).images]


def test_requests_that_wait_are_drawn_side_by_side_and_keep_their_files(server, alone):
    before = metrics(server)
    wishes = {"size": "96x64", "n": 2}
    ids = submitted(server, **wishes)
    eventually(lambda: all(status(server, id) == "finished" for id in ids), "all are drawn")
    for k, id in enumerate(ids):
        assert files(server, id) == expected(alone, k, size=(96, 64), images=2)
    after = metrics(server)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown['portable_dit_batch_pictures_bucket{le="8.0"}'] == 2 * GROUP
    assert grown['portable_dit_batch_pictures_bucket{le="6.0"}'] == 0
    assert grown["portable_dit_pictures_kept_apart_total"] == 0
    worker = server.get("/server_info").json["workers"][0]
    assert worker["batch"] == worker["recipe"]["batch"]["value"] == GROUP * PICTURES


def test_each_request_of_a_batch_has_its_own_progress_previews_and_cancel(server, alone):
    """One job is cancelled, one caller leaves; the other two never notice."""
    ids = submitted(server, count=2, previews=True)
    with ThreadPoolExecutor(1) as pool:
        eventually(lambda: all(stepped(server, id) >= 1 for id in ids), "both have begun")
        events = pool.submit(server.get, f"/v1/jobs/{ids[1]}/events")
        assert server.post(f"/v1/jobs/{ids[0]}/cancel").json["status"] == "cancelled"
        assert "data:image/png;base64," in events.result(300).body.decode()
    assert status(server, ids[1]) == "finished"
    assert files(server, ids[1]) == expected(alone, 1)
    eventually(lambda: not drawing(server), "the worker is free")


def test_when_all_of_a_batch_are_cancelled_the_device_is_free(server):
    ids = submitted(server)
    assert set(ids) <= set(drawing(server))
    for id in ids:
        server.post(f"/v1/jobs/{id}/cancel")
    answer = server.post("/v1/images/generations", {"prompt": "a red apple", "size": "64x64"})
    assert answer.status == 200
    assert {status(server, id) for id in ids} == {"cancelled"}
    eventually(lambda: not drawing(server), "the worker is free")


def test_a_caller_who_leaves_a_batch_takes_nobody_along(server, alone):
    blocker = server.post("/v1/jobs", BLOCKER).json["id"]
    eventually(lambda: status(server, blocker) == "running", "the worker is busy")
    body = {"prompt": "a red apple", "size": "512x512", "n": PICTURES}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/images/generations", json.dumps({**body, "seed": 0}), headers)
    eventually(lambda: server.get("/server_info").json["queue"]["waiting"] == 1, "it waits")
    stays = server.post("/v1/jobs", {**body, "seed": 100}).json["id"]
    server.post(f"/v1/jobs/{blocker}/cancel")
    eventually(lambda: stepped(server, stays) >= 1, "both are drawn")
    connection.close()
    eventually(lambda: status(server, stays) == "finished", "the other goes on")
    assert files(server, stays) == expected(alone, 1)
    eventually(lambda: not drawing(server), "the worker is free")


def test_a_lost_worker_is_told_to_every_request_of_its_batch(server):
    ids = submitted(server)
    starts = server.get("/server_info").json["workers"][0]["starts"]
    os.kill(server.worker_pid, signal.SIGKILL)
    eventually(lambda: all(status(server, id) == "failed" for id in ids), "each is told")
    for id in ids:
        assert server.get(f"/v1/jobs/{id}").json["error"]["code"] == "worker_lost"
    server.wait_ready()
    assert server.get("/server_info").json["workers"][0]["starts"] == starts + 1
    assert server.post("/v1/images/generations", {"prompt": "a red apple", "size": "64x64"}).status == 200


def test_a_deadline_ends_requests_of_a_batch_and_frees_the_device(recipe, tmp_path):
    wish = {"prompt": "a red apple", "size": "512x512", "n": 128}
    with running(recipe, tmp_path / "jobs", "--deadline", "1", "--max-images", "128") as server:
        ids = [server.post("/v1/jobs", {**wish, "seed": seed}).json["id"] for seed in range(4)]
        eventually(lambda: all(status(server, id) == "failed" for id in ids), "none is done in a second")
        jobs = [server.get(f"/v1/jobs/{id}").json for id in ids]
        assert {job["error"]["code"] for job in jobs} == {"deadline"}
        eventually(lambda: not drawing(server), "the worker is free")


def test_under_load_with_batches_every_request_ends_as_it_should(tiny_recipe, tmp_path):
    """Clients that cancel and leave and a worker that is killed, while requests share their steps."""
    wanted = kinds(("64x64", "96x64"))
    digests = expected_digests(tiny_recipe, wanted)
    flags = ("--max-queue", "40", "--set", "batch=8")
    with running(tiny_recipe, tmp_path / "jobs", *flags, **ONE_THREAD) as server:
        outcomes = load(server, digests, clients=16, requests=150, seed=3)
        assert not outcomes.wrong
        assert sum(outcomes.counts.values()) == 150
        assert outcomes.counts["picture"] >= 100
        counted = metrics(server)
    single = counted['portable_dit_batch_pictures_bucket{le="1.0"}']
    assert counted["portable_dit_batch_pictures_count"] > single, "some were drawn side by side"
