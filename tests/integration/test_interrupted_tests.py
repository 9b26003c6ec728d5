"""A test run that is ended in the middle leaves no process of its tests behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import alive, eventually

ROOT = Path(__file__).parents[2]
PATIENCE = 60
HANGS = '''
import os, subprocess, sys, time
from pathlib import Path

CHILD = """
import subprocess, time
print(subprocess.Popen(["sleep", "999"], start_new_session=True).pid, flush=True)
time.sleep(999)
"""

def test_that_hangs():
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, start_new_session=True)
    pids = [os.getpid(), child.pid, int(child.stdout.readline())]
    place = Path({file!r})
    place.with_suffix(".new").write_text(" ".join(map(str, pids)))
    place.with_suffix(".new").rename(place)
    time.sleep(999)
'''


@pytest.mark.parametrize(
    ("flags", "victim", "sent"),
    [
        ((), "pytest", signal.SIGKILL),
        (("-n", "1"), "pytest", signal.SIGTERM),
        (("-n", "1"), "its worker", signal.SIGKILL),
    ],
)
def test_processes_of_tests_end_with_whoever_ran_them(tmp_path, flags, victim, sent):
    assert "PORTABLE_DIT_TESTED_BY" in os.environ, "these tests have their guard too"
    told, test = tmp_path / "pids", tmp_path / "test_that_hangs.py"
    test.write_text(HANGS.format(file=str(told)))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", *flags, str(test)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    try:
        eventually(told.exists, "the test has started its processes", PATIENCE)
        tester, *started = map(int, told.read_text().split())
        assert all(map(alive, started))
        os.kill(run.pid if victim == "pytest" else tester, sent)
        eventually(lambda: not any(map(alive, started)), "nothing is left", PATIENCE)
    finally:
        run.kill()
        run.wait()
