"""Callers that take their time: how long a server waits for a head, and for an answer to be read."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SECONDS = 1.0  # of patience, in either direction
SERVE = """
import sys
from pathlib import Path
from portable_dit.catalog import load_recipe
from portable_dit.server.serving import serve
from portable_dit.server.settings import Limits, Settings

limits = Limits(header_seconds={seconds}, read_seconds={seconds})
settings = Settings(port=0, jobs=Path(sys.argv[2]), limits=limits)
say = lambda text: print(text, flush=True)
serve(load_recipe(sys.argv[1]), settings, log=lambda line: None, on_bound=say)
"""
ASK = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
ASKED = 1000  # times some 40 KB: more than the system keeps for a reader


@pytest.fixture(scope="module")
def port(tiny_recipe: Path, tmp_path_factory) -> Iterator[int]:
    jobs = tmp_path_factory.mktemp("patience") / "jobs.sqlite3"
    command = [sys.executable, "-c", SERVE.format(seconds=SECONDS), str(tiny_recipe), str(jobs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def connect(port: int) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", port))
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Within a minute, and without reading any of what was sent."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(60_000))


def answers(connection: socket.socket, count: int, *, pause: float = 0.0) -> int:
    """How many bytes so many answers have, read at ease."""
    heads = total = 0
    tail = b""
    while heads < count or not tail.endswith(b"}"):
        piece = connection.recv(65536)
        assert piece, "closed before all was read"
        heads += (tail[-20:] + piece).count(b"HTTP/1.1 200 OK") - tail[-20:].count(b"HTTP/1.1 200 OK")
        total += len(piece)
        tail = (tail + piece)[-100:]
        time.sleep(pause)
    return total


def test_a_connection_that_says_nothing_is_closed(port):
    with connect(port) as connection:
        assert is_closed(connection)


def test_a_head_that_never_ends_is_not_waited_for_also_after_a_first_request(port):
    with connect(port) as connection:
        connection.sendall(ASK)
        answers(connection, 1)
        connection.sendall(ASK[:20])
        assert is_closed(connection)


def test_a_caller_that_does_not_read_its_answers_is_dropped(port):
    with connect(port) as connection:
        connection.sendall(ASK * ASKED)
        assert is_closed(connection)
    with connect(port) as connection:
        connection.sendall(ASK)
        assert answers(connection, 1) > 1000


def test_a_caller_that_reads_slowly_gets_everything(port):
    with connect(port) as connection:
        begin = time.monotonic()
        connection.sendall(ASK * 50)
        answers(connection, 50, pause=0.005)
        assert time.monotonic() - begin > SECONDS
