"""No process outlives the pytest process whose tests started it, however that one ends.

Tests start servers, ranks and command lines, which start others, some in sessions of their own; and pytest,
or a worker of pytest-xdist, may be killed in the middle. So beside each pytest process there is a guard. All
that tests start has a mark in its environment; when pytest is gone, the guard kills what has the mark.
"""

from __future__ import annotations

import os
import secrets
import sys

MARK = "PORTABLE_DIT_TESTED_BY"
GUARD = """
import os, signal, sys, time

parent, mark = int(sys.argv[1]), sys.argv[2].encode()

def is_marked(pid):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(bytes(1))
    except OSError:  # it has ended, or is somebody else's
        return False

while os.getppid() == parent:
    time.sleep(0.1)
while found := [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and is_marked(pid)]:
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    time.sleep(0.01)
"""


def pytest_configure() -> None:
    os.environ[MARK] = f"{os.getpid()}-{secrets.token_hex(8)}"
    command = [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid()), f"{MARK}={os.environ[MARK]}"]
    nothing = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
    os.posix_spawn(command[0], command, {}, file_actions=nothing, setsid=True)
