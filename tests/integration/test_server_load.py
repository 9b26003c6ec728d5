"""A short version of tests/server_load.py: clients that cancel and leave, a worker that is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_load import SERVER_WARM, WORKER_WARM, Kind, expected_digests, growth, kinds, load
from server_process import RunningServer, running

SIZES = ("64x64", "96x64", "64x96", "128x128")
MOST_GROWTH_MIB = 24


@pytest.fixture(scope="module")
def expected(tiny_recipe: Path) -> dict[Kind, str]:
    return expected_digests(tiny_recipe, kinds(SIZES))


@pytest.fixture(scope="module")
def server(tiny_recipe: Path, tmp_path_factory) -> Iterator[RunningServer]:
    with running(tiny_recipe, tmp_path_factory.mktemp("server") / "jobs", "--max-queue", "12") as server:
        yield server
    assert "Traceback" not in "".join(server.log)


@pytest.mark.parametrize(("clients", "requests"), [(2, 60), (20, 120)])
def test_every_request_ends_as_it_should_and_memory_stays_flat(server, expected, clients, requests):
    before = server.get("/server_info").json["workers"][0]["starts"]
    outcomes = load(server, expected, clients=clients, requests=requests, seed=clients)
    assert not outcomes.wrong
    assert sum(outcomes.counts.values()) == requests
    assert outcomes.counts["picture"] >= requests * 0.7
    assert outcomes.counts["left"] > 0
    assert outcomes.counts["cancelled"] + outcomes.counts["ended before its cancel"] > 0
    assert server.get("/server_info").json["workers"][0]["starts"] == before + 1, "one worker was killed"
    server_mib, worker_mib = zip(*outcomes.memory, strict=True)
    assert growth(server_mib, warm_after=SERVER_WARM) <= MOST_GROWTH_MIB, server_mib
    assert growth(worker_mib, warm_after=WORKER_WARM) <= MOST_GROWTH_MIB, worker_mib
