"""The Triton kernels, where Triton is installed, through its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the Triton kernels run in its interpreter: pip install triton")


def run(script: str, *arguments: str, **environment: str) -> str:
    """What one of the scripts beside this file prints."""
    path = Path(__file__).parent / script
    done = subprocess.run(
        [sys.executable, path, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_kernel_computes_what_its_plain_body_computes():
    assert run("interpreted.py", TRITON_INTERPRET="1") == "done\n"


def test_every_kernel_compiles_for_chips_that_are_not_here():
    assert run("compiled.py", "90", "100") == "done\n"
