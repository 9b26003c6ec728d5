"""Ranks and replicas that Ray starts: on two hosts where this machine can play both, else on one.

A host is a network namespace with a Ray node of one processor, so that two ranks need both; a cable joins the
two, and they see nothing else. That takes Linux, root and the program `ip`; without them there is one host.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from portable_dit import Engine, Request

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
PATIENCE = 240
CABLE = "pdit0"  # its name on both hosts
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 6379
QUIET = {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # nobody else is on the cable
    "RES_OPTIONS": "timeout:1 attempts:1",  # there is nobody to ask for names either
}


@dataclass(frozen=True)
class Cluster:
    """Where to run a program: its command's beginning and its environment. hosts: with a Ray node each."""

    command: tuple[str, ...]
    environment: dict[str, str]
    hosts: int


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Names of two joined network namespaces. Raises CalledProcessError where that is not allowed."""
    names = tuple(f"pdit-{os.getpid()}-{letter}" for letter in "ab")
    with ExitStack() as undo:
        for name in names:
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
        ip("link", "add", CABLE, "netns", names[0], "type", "veth", "peer", "name", CABLE, "netns", names[1])
        for name, own, other in zip(names, ADDRESSES, ADDRESSES[::-1], strict=True):
            ip("-n", name, "addr", "add", f"{own}/24", "dev", CABLE)
            for link in (CABLE, "lo"):
                ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "route", "add", "default", "via", other)  # Ray looks for its address by a route
        yield names[0], names[1]


@contextmanager
def ray_node(host: str, log: Path, *flags: str) -> Iterator[None]:
    """A Ray node of one processor on that host."""
    command = ["ip", "netns", "exec", host, str(Path(sys.executable).with_name("ray")), "start", "--block"]
    sizes = ["--num-cpus", "1", "--object-store-memory", "100000000", "--disable-usage-stats"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, *sizes, *flags],
            env=os.environ | QUIET | {"GLOO_SOCKET_IFNAME": CABLE},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + PATIENCE
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # a node that ends of its own accord waits for others
        process.wait(PATIENCE)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ray")
    with ExitStack() as undo:
        try:
            first, second = undo.enter_context(two_hosts())
        except (OSError, subprocess.CalledProcessError):
            yield Cluster((), {}, 1)
            return
        sockets = tempfile.mkdtemp(prefix="ray")  # of a path that is short enough for sockets
        undo.callback(shutil.rmtree, sockets, ignore_errors=True)
        address = f"{ADDRESSES[0]}:{PORT}"
        here = ("--node-ip-address", ADDRESSES[0], "--port", str(PORT), "--include-dashboard", "false")
        undo.enter_context(ray_node(first, folder / "first", "--head", *here, "--temp-dir", sockets))
        there = ("--node-ip-address", ADDRESSES[1], "--address", address)
        undo.enter_context(ray_node(second, folder / "second", *there))
        yield Cluster(("ip", "netns", "exec", first), {"RAY_ADDRESS": address}, 2)


@pytest.fixture(scope="module")
def told(
    cluster: Cluster, tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, np.ndarray]:
    """What the program below saw, in a process of its own, which Ray's cluster belongs to."""
    folder = tmp_path_factory.mktemp("drawn")
    script = folder / "with_ray.py"
    script.write_text(PROGRAM)
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [*cluster.command, sys.executable, str(script), str(tiny_recipe), str(folder)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ
        | QUIET
        | {"PYTHONPATH": os.pathsep.join([tests, *filter(None, sys.path)])}
        | cluster.environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(folder / "seen.npz") as seen:
        return {name: seen[name] for name in seen.files}


@pytest.fixture(scope="module")
def alone(tiny_recipe: Path) -> list[np.ndarray]:
    """Two pictures of one process."""
    with Engine.load(tiny_recipe) as engine:
        return [image.pixels for image in engine.generate(Request("a red apple", images=2)).images]


def test_ranks_on_the_hosts_draw_the_picture_of_one_process(told, alone, cluster):
    assert told["nodes"] == cluster.hosts
    assert np.array_equal(told["before"], alone[0])


def test_a_rank_that_is_lost_is_named_and_started_again(told, alone):
    assert "rank 1 of 2 is gone while drawing" in str(told["error"])
    assert np.array_equal(told["after"], alone[0])


def test_the_server_draws_on_replicas_on_the_hosts(told, alone):
    assert np.array_equal(told["served"], np.stack(alone))


PROGRAM = """
import base64, io, os, sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np, psutil, ray
from PIL import Image
from server_process import eventually, running

from portable_dit import Engine, Request
from portable_dit.errors import RankError
from portable_dit.result import Stepped

recipe, folder = sys.argv[1], Path(sys.argv[2])
here = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": 2, "include_dashboard": False}
ray.init(**here, configure_logging=False, log_to_driver=False)
seen = {"nodes": len(ray.nodes())}
with Engine.load(recipe, {"layout.ulysses": 2, "executor": "ray"}) as engine:
    seen["before"] = engine.generate("a red apple").images[0].pixels

    rank = engine.reports[1].process

    def kill(event):
        if isinstance(event, Stepped) and event.step == 2:
            with suppress(psutil.NoSuchProcess):  # more is told of what it drew
                psutil.Process(rank).kill()

    try:
        engine.generate(Request("a red apple", images=100), on_event=kill)  # ranks are ahead of what is told
    except RankError as error:
        seen["error"] = str(error)
    seen["after"] = engine.generate("a red apple").images[0].pixels

os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
words = ("--set", "executor=ray", "--set", "layout.data=2")
with running(recipe, folder / "jobs.sqlite3", *words) as server:
    def served(seed):
        answer = server.draw(seed=seed)
        assert answer.status == 200, (answer.body, server.log)
        picture = base64.b64decode(answer.json["data"][0]["b64_json"])
        return np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))

    with ThreadPoolExecutor(2) as clients:
        seen["served"] = np.stack(list(clients.map(served, range(2))))
    eventually(lambda: not ray.available_resources().get("CPU"), "both processors have a replica")
    server.stop()
np.savez(folder / "seen.npz", **seen)
ray.shutdown()
"""
