"""A running `portable-dit serve`, for tests: a process of its own, loopback only, ended with the test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_SECONDS = 300


@dataclass
class Answer:
    """What came back over HTTP."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


@dataclass
class RunningServer:
    """log: the lines of its stderr, all of them when it has ended."""

    url: str
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def worker_pid(self) -> int:
        return self.get("/server_info").json["workers"][0]["pid"]

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        timeout=300.0,
    ) -> Answer:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        own = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data, own, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return Answer(response.status, dict(response.headers), response.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, dict(error.headers), error.read())

    def get(self, path: str, **options: Any) -> Answer:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        return self.request("POST", path, body, **options)

    def draw(self, prompt: str = "a red apple", **fields: Any) -> Answer:
        return self.post("/v1/images/generations", {"prompt": prompt, **fields})

    def wait_ready(self, ready: bool = True) -> None:
        eventually(lambda: (self.get("/ready").status == 200) == ready, f"ready is {ready}")

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(sig)
        return self.process.wait(300)


def eventually(holds, what: str, seconds: float = START_SECONDS) -> Any:
    """Waits until the call gives something true, and gives that."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = holds()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds:g} s: {what}")


def alive(pid: int) -> bool:
    """Whether there is such a process; one that has ended and that nobody has asked after is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextlib.contextmanager
def running(
    recipe: Path | str, jobs: Path, *arguments: str, wait: bool = True, **environment: str
) -> Iterator[RunningServer]:
    """A server on a free port; killed at the end if it still runs."""
    command = [sys.executable, "-m", "portable_dit", "serve", "--recipe", str(recipe), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--jobs", str(jobs), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **environment},
    )
    server = RunningServer("", process)
    reader = threading.Thread(target=lambda: server.log.extend(process.stderr), daemon=True)
    try:
        reader.start()
        server.url = process.stdout.readline().strip()
        assert server.url, server.log
        if wait:
            server.wait_ready()
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(300)
        reader.join(300)
        process.stdout.close()
        process.stderr.close()
