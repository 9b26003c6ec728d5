"""A short version of tests/server_load.py: clients that cancel and leave, a worker that is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_load import SERVER_WARM, WORKER_WARM, expected_digests, growth, kinds, load
from server_process import running

SIZES = ("64x64", "96x64", "64x96", "128x128")
MOST_GROWTH_MIB = 24


@pytest.mark.parametrize("clients", [2, 20])
def test_every_request_ends_as_it_should_and_memory_stays_flat(
    tiny_recipe: Path, tmp_path: Path, clients: int
):
    expected = expected_digests(tiny_recipe, kinds(SIZES))
    with running(tiny_recipe, tmp_path / "jobs", "--max-queue", "12") as server:
        outcomes = load(server, expected, clients=clients, requests=200)
        starts = server.get("/server_info").json["workers"][0]["starts"]
        log = "".join(server.log)
    assert not outcomes.wrong
    assert sum(outcomes.counts.values()) == 200
    assert outcomes.counts["picture"] >= 120
    assert outcomes.counts["left"] > 0
    assert outcomes.counts["cancelled"] + outcomes.counts["ended before its cancel"] > 0
    assert starts == 2, "one worker was killed"
    assert "Traceback" not in log
    server_mib, worker_mib = zip(*outcomes.memory, strict=True)
    assert growth(server_mib, warm_after=SERVER_WARM) <= MOST_GROWTH_MIB, server_mib
    assert growth(worker_mib, warm_after=WORKER_WARM) <= MOST_GROWTH_MIB, worker_mib
