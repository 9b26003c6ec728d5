"""One lane: what is tried on a vendor's devices, and whether it is as good as it was.

    python ci/lane.py xpu --steps tests,conformance,recipes,bench --out lane-xpu

Numerics gate: a picture of the built-in model must lie near the host's in float32, by the decibels in
ci/baselines/NAME.json. Speed is reported, and gates once the baseline holds enough nights. `--record` adds
tonight to the baseline, for a person to commit.

Exit code 0: all that was asked for ran and passed. 1: something failed. 75: the devices are not here.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOT_RUN = 75  # EX_TEMPFAIL: nothing was tried, so nothing is right or wrong
DRAWN = ("--prompt", "a red apple on a blue background", "--size", "512x512", "--seed", "7")
MODEL = "h3-mini"
BUILT_IN = ("--set", f"model={MODEL}", "--set", "weights=builtin", "--set", "sampling.steps=6")


@dataclass(frozen=True)
class Outcome:
    """What became of one part. status: passed, failed or not run."""

    step: str
    status: str
    detail: str
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Lane:
    """What a lane is run with. count: devices that are here. weights: of the large model, if given."""

    name: str
    recipes: str
    out: Path
    count: int
    weights: str | None
    baseline: Mapping[str, Any]


def portable_dit(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line as a user runs it."""
    command = [sys.executable, "-m", "portable_dit", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def find_devices(name: str) -> tuple[list[str], str | None]:
    """Names of the backend's devices, or why there are none."""
    done = portable_dit("backends", "--json")
    if done.returncode != 0:
        return [], _last_line(done.stderr)
    for plugin in json.loads(done.stdout)["plugins"]:
        if name in (plugin["name"], *plugin["backends"]):
            reason = plugin["reason"] or "no device"
            return (plugin["devices"], None) if plugin["ok"] and plugin["devices"] else ([], reason)
    return [], f"the package of backend {name} is not installed"


def run_tests(lane: Lane) -> list[Outcome]:
    folder = ROOT / "backends" / lane.name / "tests"
    if not folder.is_dir():
        return [Outcome("tests", "not run", f"{lane.name} has no package of its own")]
    command = [sys.executable, "-m", "pytest", "-q", str(folder), f"--junit-xml={lane.out / 'tests.xml'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [Outcome("tests", _status(done), _last_line(done.stdout))]


def run_conformance(lane: Lane) -> list[Outcome]:
    files = "--json", str(lane.out / "conformance.json"), "--junit", str(lane.out / "conformance.xml")
    done = portable_dit("conformance", lane.name, *files)
    (lane.out / "conformance.md").write_text(done.stdout)
    failed = [line for line in done.stderr.splitlines() if line.startswith("FAIL")]
    return [Outcome("conformance", _status(done), failed[0] if failed else _last_line(done.stderr))]


def run_recipes(lane: Lane) -> list[Outcome]:
    """Every recipe of the vendor that this machine has devices for, with the built-in model."""
    found = [entry["name"] for entry in json.loads(portable_dit("recipes", "list", "--json").stdout)]
    names = [name for name in found if name.startswith(f"{lane.recipes}/")]
    if not names:
        return [Outcome("recipes", "not run", f"there are none under {lane.recipes}/")]
    return [outcome for name in names for outcome in _try_recipe(lane, name)]


def _try_recipe(lane: Lane, name: str) -> list[Outcome]:
    recipe = json.loads(portable_dit("recipes", "show", name, "--json").stdout)["recipe"]
    values = {key: entry["value"] for key, entry in recipe.items()}
    count = values["device.count"] or 1
    if count > lane.count:
        needs = f"needs {count} devices, {lane.count} here"
        return [Outcome(f"recipe {name}", "not run", needs)]
    outcomes = [_draw_built_in(lane, name, values)]
    if lane.weights is not None:
        outcomes.append(_draw_large(lane, name))
    return outcomes


def _draw_built_in(lane: Lane, name: str, values: Mapping[str, Any]) -> Outcome:
    planned = portable_dit("plan", "--recipe", name, *BUILT_IN)
    if planned.returncode == 2:  # a layout or format that the small model does not have
        return Outcome(f"recipe {name}", "not run", f"{MODEL} cannot: {_last_line(planned.stderr)}")
    picture = lane.out / f"{name.replace('/', '-')}.png"
    drawn = portable_dit("run", "--recipe", name, *BUILT_IN, *DRAWN, "-o", str(picture))
    if drawn.returncode != 0:
        return Outcome(f"recipe {name}", "failed", _last_line(drawn.stderr))
    return judge_numerics(
        f"recipe {name}", precision_of(values), likeness(picture, _host_picture(lane)), lane
    )


def _draw_large(lane: Lane, name: str) -> Outcome:
    picture = lane.out / f"{name.replace('/', '-')}-large.png"
    start = time.perf_counter()
    weights = "--set", f"weights={lane.weights}"
    drawn = portable_dit("run", "--recipe", name, *weights, *DRAWN[:2], "-o", str(picture))
    seconds = time.perf_counter() - start
    return Outcome(f"recipe {name} large", _status(drawn), _last_line(drawn.stderr), seconds)


def _host_picture(lane: Lane) -> Path:
    """The built-in model's picture on the host's own processor in float32."""
    path = lane.out / "host.png"
    if not path.exists():
        host = "--backend", "cpu", "--precision", "float32"
        done = portable_dit("run", "--recipe", "cpu/h3-mini", *host, *DRAWN, "-o", str(path))
        assert done.returncode == 0, done.stderr
    return path


def run_bench(lane: Lane) -> list[Outcome]:
    """Seconds of the built-in model, against the nights before."""
    wish = "--recipe", "cpu/h3-mini", "--backend", lane.name, "--json"
    done = portable_dit("bench", *wish, "--size", "512x512", "--requests", "5")
    if done.returncode != 0:
        return [Outcome("bench", "failed", _last_line(done.stderr))]
    report = json.loads(done.stdout)
    return [judge_speed(lane.baseline, report["device"], report["median"]["total"])]


def run_layouts(lane: Lane) -> list[Outcome]:
    """One device against each layout of all of them, with the large model; its tables go into the report."""
    if lane.count < 2:
        return [Outcome("layouts", "not run", "there is one device")]
    command = [sys.executable, "docs/benchmarks/layouts.py", "--devices", str(lane.count)]
    command += ["--backend", lane.name, "--out", str(lane.out / "layouts.jsonl")]
    command += ["--set", f"weights={lane.weights or 'random'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    (lane.out / "layouts.md").write_text(done.stdout)
    return [
        Outcome("layouts", _status(done), _last_line(done.stdout if done.returncode == 0 else done.stderr))
    ]


def precision_of(values: Mapping[str, Any]) -> str:
    """Which of the baseline's figures a recipe's picture is held to."""
    quantized = any(values[f"quantization.{part}"] for part in ("dit", "text_encoder", "vae"))
    return "8 bits" if quantized else "float32" if values["precision"] == "float32" else "bfloat16"


def likeness(one: Path, other: Path) -> float:
    """Decibels between two pictures of one size: 20 log10 of 255 over the root mean square difference."""
    import numpy as np
    from PIL import Image

    a, b = (np.asarray(Image.open(path).convert("RGB")).astype(float) for path in (one, other))
    difference = float(np.sqrt(np.mean((a - b) ** 2))) if a.shape == b.shape else math.inf
    return math.inf if difference == 0 else 20 * math.log10(255 / difference)


def judge_numerics(step: str, precision: str, decibels: float, lane: Lane) -> Outcome:
    """Whether a picture is near enough to the host's."""
    least = lane.baseline["least_db"][precision]
    text = f"{decibels:.1f} dB from the host's picture, at least {least:.1f} in {precision}"
    figures = {} if math.isinf(decibels) else {"decibels": round(decibels, 1)}
    return Outcome(step, "passed" if decibels >= least else "failed", text, figures=figures)


def judge_speed(baseline: Mapping[str, Any], device: str, seconds: float) -> Outcome:
    """Whether tonight is as fast as the device's nights before; a mere report until there are enough."""
    nights, needed = baseline["nights"].get(device, []), baseline["nights_needed"]
    figures = {"device": device, "seconds": seconds}
    if len(nights) < needed:
        text = f"{seconds:.3f} s on {device}; {len(nights)} of {needed} nights, so it does not gate yet"
        return Outcome("bench", "passed", text, figures=figures)
    usual = statistics.median(night["seconds"] for night in nights)
    slower = seconds / usual - 1
    text = (
        f"{seconds:.3f} s on {device}, {slower:+.1%} against the median {usual:.3f} of {len(nights)} nights"
    )
    return Outcome("bench", "failed" if slower > baseline["slower_by"] else "passed", text, figures=figures)


def with_night(baseline: Mapping[str, Any], outcomes: Sequence[Outcome], date: str) -> dict[str, Any]:
    """The baseline with tonight's seconds in it."""
    nights = {device: list(held) for device, held in baseline["nights"].items()}
    for outcome in outcomes:
        if outcome.step == "bench" and "seconds" in outcome.figures:
            night = {"date": date, "seconds": round(outcome.figures["seconds"], 4)}
            nights.setdefault(outcome.figures["device"], []).append(night)
    return {**baseline, "nights": nights}


STEPS: Mapping[str, Callable[[Lane], list[Outcome]]] = {
    "tests": run_tests,
    "conformance": run_conformance,
    "recipes": run_recipes,
    "bench": run_bench,
    "layouts": run_layouts,
}


def lanes() -> dict[str, dict[str, Any]]:
    """What ci/lanes.toml says, by name of the lane."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib

    read: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "ci" / "lanes.toml").read_text())["lanes"]
    return read


def write_report(out: Path, name: str, status: str, reason: str | None, outcomes: Sequence[Outcome]) -> None:
    report = {
        "lane": name,
        "status": status,
        "reason": reason,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    known = lanes()
    parser = argparse.ArgumentParser(description="Tries a vendor's devices.")
    parser.add_argument("name", choices=sorted(known))
    parser.add_argument("--gpus", type=int, help="devices to use at most")
    parser.add_argument("--weights", help="of the large model: a folder or a hub id")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--record", action="store_true", help="add tonight to the baseline")
    given = parser.parse_args(arguments)
    steps = given.steps.split(",")
    if unknown := set(steps) - set(STEPS):
        parser.error(f"--steps: {', '.join(sorted(unknown))} not among {', '.join(STEPS)}")
    out = given.out or ROOT / f"lane-{given.name}"
    out.mkdir(parents=True, exist_ok=True)
    devices, reason = find_devices(given.name)
    if not devices:
        print(f"lane {given.name}: not run: {reason}")
        write_report(out, given.name, "not run", reason, [])
        return NOT_RUN
    print(f"lane {given.name}: {len(devices)} x {devices[0]}")
    file = ROOT / "ci" / "baselines" / f"{given.name}.json"
    count = min(len(devices), given.gpus or len(devices))
    baseline = json.loads(file.read_text())
    lane = Lane(given.name, known[given.name]["recipes"], out, count, given.weights, baseline)
    outcomes = []
    for step in steps:
        for outcome in STEPS[step](lane):
            print(f"{outcome.status:8} {outcome.step}: {outcome.detail}")
            outcomes.append(outcome)
    states = {outcome.status for outcome in outcomes}
    status = "failed" if "failed" in states else "passed" if "passed" in states else "not run"
    write_report(out, given.name, status, None, outcomes)
    if given.record and status == "passed":
        date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        file.write_text(json.dumps(with_night(baseline, outcomes, date), indent=2) + "\n")
    print(f"lane {given.name}: {status}")
    return {"passed": 0, "failed": 1, "not run": NOT_RUN}[status]


def _status(done: subprocess.CompletedProcess[str]) -> str:
    return "passed" if done.returncode == 0 else "failed"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


if __name__ == "__main__":
    sys.exit(main())
