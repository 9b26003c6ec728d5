"""The lanes: one for each backend package, their scripts without hardware, and how a night is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "ci"))

import lane  # noqa: E402
import matrix  # noqa: E402

NAMES = sorted(lane.lanes())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_every_backend_package_has_a_lane_with_recipes_and_a_baseline():
    packages = {path.parent.name for path in (ROOT / "backends").glob("*/pyproject.toml")}
    assert packages <= set(NAMES)
    for name in NAMES:
        told = lane.lanes()[name]
        assert list((ROOT / "recipes" / told["recipes"]).rglob("*.yaml"))
        assert told["runner"]
        assert told["devices"] >= 1
        baseline = json.loads((ROOT / "ci" / "baselines" / f"{name}.json").read_text())
        assert baseline["lane"] == name
        assert set(baseline["least_db"]) == {"float32", "bfloat16", "8 bits"}
        assert baseline["nights_needed"] >= 5
        assert 0 < baseline["slower_by"] < 1


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment with every backend package, as on a runner whose devices are missing."""
    packages = [name for name in NAMES if (ROOT / "backends" / name).is_dir()]
    for name in packages:
        info = tmp_path / f"portable_dit_{name}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: portable-dit-{name}\nVersion: 0.1.0\n")
        entry = f"[portable_dit.backends]\n{name} = portable_dit_{name}\n"
        (info / "entry_points.txt").write_text(entry)
    folders = (tmp_path, *(ROOT / "backends" / name for name in packages), ROOT)
    path = os.pathsep.join(map(str, folders))
    return {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": path}


def test_every_package_without_its_hardware_says_why(installed):
    command = [sys.executable, "-m", "portable_dit", "backends", "--json"]
    done = subprocess.run(command, env=installed, capture_output=True, text=True, timeout=300, check=True)
    found = {plugin["name"]: plugin for plugin in json.loads(done.stdout)["plugins"]}
    for name in NAMES:
        assert found[name]["ok"]
        assert found[name]["devices"] == []
        assert found[name]["reason"]


def test_a_lane_without_its_hardware_says_not_run_and_is_never_green(installed, tmp_path):
    done = subprocess.run(
        ["bash", "ci/vendor.sh", NAMES[0], "--no-setup", "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env=installed,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == lane.NOT_RUN, done.stderr
    assert done.stdout.startswith(f"lane {NAMES[0]}: not run: ")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["status"], report["outcomes"]) == ("not run", [])
    assert report["reason"]


def test_the_vendors_own_checks_without_the_wheel_say_not_run(tmp_path):
    done = subprocess.run(
        ["bash", "ci/torch_npu.sh", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == lane.NOT_RUN
    assert done.stdout.startswith("torch_npu: not run: ")


def test_the_script_without_a_name_says_how_it_is_called():
    done = subprocess.run(["bash", "ci/vendor.sh"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "ci/vendor.sh NAME [--gpus N]" in done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_only_call_the_scripts(path):
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    lines = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert lines
    for line in lines:
        assert "ci/core.sh" in line or "ci/vendor.sh" in line or "ci/matrix.py" in line
        assert len(line.splitlines()) == 1


def test_buildkite_has_a_step_for_every_lane_and_none_of_them_hides_a_failure():
    steps = yaml.safe_load((ROOT / ".buildkite" / "pipeline.yml").read_text())["steps"]
    assert {step["label"] for step in steps} == {"core", *NAMES}
    for step in steps:
        if step["label"] != "core":
            assert step["command"] == f"bash ci/vendor.sh {step['label']} --out lane"
            assert step["soft_fail"] == [{"exit_status": lane.NOT_RUN}]


def test_the_matrix_of_a_workflow_is_what_the_lanes_say():
    assert matrix.matrix([]) == []
    (one,) = matrix.matrix(["xpu"])
    assert one == {"lane": "xpu", **{key: lane.lanes()["xpu"][key] for key in ("image", "runner")}}
    with pytest.raises(SystemExit, match="tpu not among"):
        matrix.matrix(["tpu"])


def nights(*seconds: float, needed: int = 3) -> dict:
    held = [{"date": "2026-12-01", "seconds": one} for one in seconds]
    return {"nights": {"card": held}, "nights_needed": needed, "slower_by": 0.1}


@pytest.mark.parametrize(
    ("before", "tonight", "status", "words"),
    [
        ((), 9.0, "passed", "0 of 3 nights, so it does not gate yet"),
        ((1.0, 1.0), 9.0, "passed", "2 of 3 nights"),
        ((1.0, 1.0, 5.0), 1.09, "passed", "+9.0% against the median 1.000"),
        ((1.0, 1.0, 5.0), 1.11, "failed", "+11.0%"),
        ((1.0, 1.0, 1.0), 0.5, "passed", "-50.0%"),
    ],
)
def test_speed_gates_once_enough_nights_are_in(before, tonight, status, words):
    outcome = lane.judge_speed(nights(*before), "card", tonight)
    assert outcome.status == status
    assert words in outcome.detail


def test_another_device_has_nights_of_its_own():
    assert lane.judge_speed(nights(1.0, 1.0, 1.0), "other card", 9.0).status == "passed"


def test_a_recorded_night_is_added_to_its_device():
    outcome = lane.judge_speed(nights(1.0), "card", 2.0)
    told = lane.with_night(nights(1.0), [outcome], "2026-12-02")
    assert told["nights"]["card"][-1] == {"date": "2026-12-02", "seconds": 2.0}
    assert len(told["nights"]["card"]) == 2


def test_a_picture_that_is_too_far_from_the_hosts_fails(tmp_path):
    import numpy as np
    from PIL import Image

    here = lane.Lane("xpu", "intel", tmp_path, 1, None, {"least_db": {"bfloat16": 35.0}})
    first = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    for name, change in (("a", 0), ("b", 1), ("c", 20)):
        Image.fromarray(np.clip(first.astype(int) + change, 0, 255).astype(np.uint8)).save(
            tmp_path / f"{name}.png"
        )
    for name, status in (("a", "passed"), ("b", "passed"), ("c", "failed")):
        decibels = lane.likeness(tmp_path / f"{name}.png", tmp_path / "a.png")
        assert lane.judge_numerics("x", "bfloat16", decibels, here).status == status


def test_a_recipe_is_held_to_the_figure_of_its_precision():
    plain = dict.fromkeys(("quantization.dit", "quantization.text_encoder", "quantization.vae"))
    assert lane.precision_of(plain | {"precision": "bfloat16"}) == "bfloat16"
    assert lane.precision_of(plain | {"precision": "float32"}) == "float32"
    assert lane.precision_of(plain | {"precision": "bfloat16", "quantization.dit": "mxfp8"}) == "8 bits"
