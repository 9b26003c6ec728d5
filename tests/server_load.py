"""Many clients at once against a running server, some of which cancel or leave, while a worker is killed.

    python tests/server_load.py --clients 20 --requests 500        # the built-in model, in minutes
    python tests/server_load.py --clients 2 --requests 500

Every accepted request has to end in a picture that is the right one, an honest error, or a cancel; and the
memory of both processes has to be flat once they are warm.
"""

from __future__ import annotations

import argparse
import base64
import collections
import hashlib
import http.client
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from server_process import RunningServer, eventually, running

MIB = 2**20
SERVER_WARM, WORKER_WARM = (
    0.33,
    0.75,
)  # shares of a run after which memory has to be flat; a worker dies at 0.5
PROMPTS = ("a red apple", "a green apple on the blue")
SEEDS = range(4)


@dataclass(frozen=True)
class Kind:
    """What may be asked for: a prompt, a size and a seed."""

    prompt: str
    size: str
    seed: int


@dataclass
class Outcomes:
    """How the requests ended, and what must not have happened."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)  # MiB of the server and of its worker
    seconds: float = 0.0


def kinds(sizes: Sequence[str]) -> list[Kind]:
    return [Kind(prompt, size, seed) for prompt in PROMPTS for size in sizes for seed in SEEDS]


def expected_digests(recipe: Path | str, wanted: Sequence[Kind]) -> dict[Kind, str]:
    """sha256 of the file that `run` writes for each kind."""
    from portable_dit.engine import Engine
    from portable_dit.request import Request, parse_size

    digests = {}
    with Engine.load(recipe) as engine:
        for kind in wanted:
            request = Request(kind.prompt, size=parse_size(kind.size), seed=kind.seed, format="png")
            data = engine.generate(request).images[0].encoded["png"]
            digests[kind] = hashlib.sha256(data).hexdigest()
    return digests


def load(
    server: RunningServer,
    expected: Mapping[Kind, str],
    *,
    clients: int,
    requests: int,
    seed: int = 0,
    on_sample: Callable[[int, int], None] = lambda server_mib, worker_mib: None,
) -> Outcomes:
    """Runs it all: 10 % are jobs that are cancelled, 5 % leave, and half way one worker is killed."""
    outcomes, lock = Outcomes(), threading.Lock()
    numbers = iter(range(requests))
    choices = sorted(expected, key=lambda kind: (kind.size, kind.seed, kind.prompt))
    kill_at = requests // 2

    def client() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            rng = random.Random(f"{seed}/{number}")
            if number == kill_at:
                os.kill(server.worker_pid, signal.SIGKILL)
            kind, chance = rng.choice(choices), rng.random()
            try:
                if chance < 0.10:
                    outcome = cancelled_job(server, kind, rng)
                elif chance < 0.15:
                    outcome = leave(server, kind, rng)
                else:
                    outcome = draw(server, kind, expected[kind])
            except (OSError, AssertionError, http.client.HTTPException, KeyError) as error:
                outcome = f"WRONG: {type(error).__name__}: {error}"
            with lock:
                outcomes.counts[outcome.split(":")[0]] += 1
                if outcome.startswith("WRONG"):
                    outcomes.wrong.append(f"request {number}, {kind}: {outcome}")
                if number % max(requests // 12, 1) == 0:
                    outcomes.memory.append(sample(server))
                    on_sample(*outcomes.memory[-1])

    begin = time.monotonic()
    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: idle(server), "nothing waits and nothing is drawn any more")
    outcomes.memory.append(sample(server))
    outcomes.seconds = time.monotonic() - begin
    return outcomes


def draw(server: RunningServer, kind: Kind, digest: str) -> str:
    """A picture, or an error that says what happened; a full queue is asked again, as it says."""
    while True:
        body = {"prompt": kind.prompt, "size": kind.size, "seed": kind.seed}
        answer = server.post("/v1/images/generations", body, timeout=600)
        if answer.status != 429:
            break
        assert int(answer.headers["retry-after"]) >= 1
        time.sleep(0.05)
    if answer.status != 200:
        assert (answer.status, answer.error["code"]) == (503, "worker_lost"), answer.body
        return "worker lost"
    data = base64.b64decode(answer.json["data"][0]["b64_json"])
    if hashlib.sha256(data).hexdigest() != digest:
        return "WRONG: another picture than run draws"
    return "picture"


def cancelled_job(server: RunningServer, kind: Kind, rng: random.Random) -> str:
    body = {"prompt": kind.prompt, "size": kind.size, "seed": kind.seed}
    while (answer := server.post("/v1/jobs", body, timeout=600)).status == 429:
        time.sleep(0.05)
    assert answer.status == 202, answer.body
    path = f"/v1/jobs/{answer.json['id']}"
    time.sleep(rng.random() * 0.1)
    state = server.post(f"{path}/cancel").json["status"]
    assert state in ("cancelled", "finished", "failed"), state
    return "cancelled" if state == "cancelled" else "ended before its cancel"


def leave(server: RunningServer, kind: Kind, rng: random.Random) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    body = json.dumps({"prompt": kind.prompt, "size": kind.size, "seed": kind.seed})
    connection.request("POST", "/v1/images/generations", body, {"Content-Type": "application/json"})
    time.sleep(rng.random() * 0.1)
    connection.close()
    return "left"


def idle(server: RunningServer) -> bool:
    info = server.get("/server_info").json
    return not info["queue"]["waiting"] and not any(worker["drawing"] for worker in info["workers"])


def sample(server: RunningServer) -> tuple[int, int]:
    """Resident MiB of the server and of its worker, 0 while there is none."""
    return resident(server.process.pid), resident(server.worker_pid)


def resident(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss // MIB
    except psutil.Error:
        return 0


def growth(samples: Sequence[int], *, warm_after: float) -> int:
    """MiB by which the last sample is above the highest of those after such a share of them."""
    return samples[-1] - max(samples[int(len(samples) * warm_after) : -1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="cpu/h3-mini")
    parser.add_argument("--sizes", nargs="+", default=["256x256", "384x256", "256x384", "320x320"])
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--requests", type=int, default=500)
    arguments = parser.parse_args()
    expected = expected_digests(arguments.recipe, kinds(arguments.sizes))
    with tempfile.TemporaryDirectory() as folder, running(arguments.recipe, Path(folder) / "jobs") as server:
        outcomes = load(
            server,
            expected,
            clients=arguments.clients,
            requests=arguments.requests,
            on_sample=lambda *mib: print("server and worker, MiB:", *mib, flush=True),
        )
    print(f"{arguments.clients} clients, {arguments.requests} requests: {outcomes.seconds:.1f} s")
    for name, count in outcomes.counts.most_common():
        print(f"{count:6} {name}")
    of_server, of_worker = zip(*outcomes.memory, strict=True)
    print("growth of the server after a third, MiB:", growth(of_server, warm_after=SERVER_WARM))
    print("growth of the second worker, MiB:", growth(of_worker, warm_after=WORKER_WARM))
    print("\n".join(outcomes.wrong))
    sys.exit(bool(outcomes.wrong))


if __name__ == "__main__":
    main()
