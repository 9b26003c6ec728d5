"""The plan's predicted peak against the peak of a real process on this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import portable_dit

BUILTIN = Path(portable_dit.__file__).parent / "models" / "h3_mini" / "model_index.json"
COMMAND = (sys.executable, "-m", "portable_dit")


@pytest.mark.skipif(not BUILTIN.is_file(), reason="the built-in weights are not in this checkout")
@pytest.mark.parametrize("precision", ["auto", "float32"])
def test_the_predicted_peak_is_within_15_percent_of_the_measured_one(tmp_path, precision):
    flags = ("--recipe", "cpu/h3-mini", "--size", "512x512", "--precision", precision, "--json")
    plan = subprocess.run([*COMMAND, "plan", *flags], capture_output=True, text=True, check=True)
    predicted = json.loads(plan.stdout)["bytes"]["peak"]
    wish = ("--prompt", "a red apple", "-o", str(tmp_path / "out.png"))
    run = subprocess.run([*COMMAND, "run", *flags, *wish], capture_output=True, text=True, check=True)
    measured = json.loads(run.stdout)["peak_bytes"]
    assert 0.85 * measured <= predicted <= 1.15 * measured
