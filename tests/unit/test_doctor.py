"""The doctor, through its front door."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from portable_dit.doctor import Check, Report, examine, unmet_requirements
from portable_dit.models.h3_image.random_checkpoint import write_random

BROKEN_KERNELS = """
from portable_dit.backend import AttentionKernel, Backend
from portable_dit.capabilities import Device
from portable_dit.hooks import hookimpl

class Wrong(AttentionKernel):
    id = "wrong"
    def run(self, q, k, v, mask, *, scale):
        return super().run(q, k, v, mask, scale=1.0)

class Sick(Backend):
    id = "sick"
    api_version = 1
    def devices(self):
        return [Device("sick", 0, "cpu", "sick card", "x", 1)]
    def attention_kernels(self):
        return [Wrong()]

@hookimpl
def portable_dit_backends():
    return [Sick()]
"""


def test_a_healthy_machine_has_numbers_for_every_kernel_and_exit_code_zero(cli, tmp_path: Path) -> None:
    """With a recipe that is read as a run would read it: a file in a dialect that names cannot tell, with the
    rest of the checkpoint elsewhere.
    """
    write_random(tmp_path / "comfy", config="tiny", dialect="comfy", seed=0)
    (file,) = (tmp_path / "comfy" / "diffusion_models").iterdir()
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: h3-image\nweights: {tmp_path / 'comfy'}\ncomponents: {{dit: {file}}}\n"
        "checkpoint_dialect: comfy\ndevice: {backend: cpu}\n"
    )
    run = cli("doctor", "--json", "--recipe", recipe)
    report = json.loads(run.stdout)
    assert run.exit_code == 0, report
    assert report["ok"]
    states = {check["name"]: check["status"] for check in report["checks"]}
    always = {"python", "torch", "memory", "processor", "requirements", "recipes", "plugin cpu"}
    assert always <= states.keys()
    assert states["plan"] == "ok"
    by_op: dict[str, list[dict[str, object]]] = {}
    for probe in report["probes"]:
        by_op.setdefault(probe["op"], []).append(probe)
    for op in ("attention", "linear:int8_row", "linear:mxfp8", "linear:fp8_row", "norm_modulate", "swiglu"):
        measured = [probe for probe in by_op[op] if probe["status"] == "pass"]
        assert measured, op
        assert all(0 <= p["error"] <= p["tolerance"] and p["seconds"] > 0 for p in measured)  # type: ignore[operator]


def test_a_wrong_kernel_that_would_be_used_is_a_problem_with_advice(cli, shelf) -> None:
    shelf.install("sick", BROKEN_KERNELS)
    run = cli("doctor", "--json")
    report = json.loads(run.stdout)
    assert run.exit_code == 1
    problem = next(check for check in report["checks"] if check["status"] == "problem")
    assert problem["name"] == "kernel attention wrong"
    assert "error" in problem["detail"]
    assert problem["advice"]


def test_kernels_are_shown_when_they_are_asked_for(cli, shelf) -> None:
    shelf.install("sick", BROKEN_KERNELS)
    summary, table = (cli("doctor", "--backend", "sick", *flags).stdout for flags in ([], ["--kernels"]))
    assert "problem  kernel attention wrong: " in summary
    assert "--kernels shows each of them" in summary
    assert "tolerance" not in summary
    assert "plain: ms of the" in " ".join(table.split())
    assert re.search(r"attention +wrong +\S+ +fail", table)


def test_a_broken_plugin_is_a_warning_until_it_is_asked_for(cli, shelf) -> None:
    shelf.install("sick", "import no_such_driver_library")
    run = cli("doctor", "--backend", "sick")
    assert run.exit_code == 1
    assert "tolerance" not in run.stdout
    assert re.search(r"warning  plugin sick: pdit\S+ 1.2: ModuleNotFoundError", run.stdout)
    assert "problem  backend: backend 'sick' was asked for" in run.stdout
    assert "no_such_driver_library" in run.stdout


def test_an_unmet_requirement_of_a_plugin_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requires = (
        "Requires-Dist: numpy<1.0\nRequires-Dist: no-such-distribution-here>=2\nRequires-Dist: pluggy>=1\n"
        "Requires-Dist: also-missing; extra == 'more'\n"
    )
    info = tmp_path / "pdit_doctor_needy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: pdit-doctor-needy\nVersion: 1.0\n{requires}"
    )
    (info / "entry_points.txt").write_text("[portable_dit.backends]\nneedy = pdit_doctor_needy\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    unmet = unmet_requirements("pdit-doctor-needy")
    assert len(unmet) == 2
    assert "numpy<1.0, and" in unmet[0]
    assert "no-such-distribution-here>=2, which is not installed" in unmet[1]
    found = next(check for check in examine(backend="none-such").checks if check.name == "requirements")
    assert found.status == "problem"
    assert "no-such-distribution-here" in found.detail


def test_torch_that_cannot_be_imported_is_explained_not_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "raise RuntimeError('Failed to load the backend extension: some_device')"
    )
    run = subprocess.run(
        [sys.executable, "-m", "portable_dit", "doctor"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, *filter(None, sys.path))))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "problem  torch: cannot be imported: RuntimeError: Failed to load the backend" in run.stdout
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in run.stdout
    assert "Traceback" not in run.stderr


def test_a_recipe_that_cannot_work_is_a_problem(cli, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: h3-mini\ndevice: {backend: no-such-backend}\n")
    run = cli("doctor", "--recipe", recipe)
    assert run.exit_code == 1
    assert "problem  backend: backend 'no-such-backend' is not installed" in run.stdout
    recipe.write_text("model: h3-mini\nprecison: float32\n")
    run = cli("doctor", "--recipe", recipe, "--backend", "no-such-backend")
    assert run.exit_code == 1
    assert "Did you mean 'precision'" in run.stdout


def test_only_a_problem_makes_the_report_bad() -> None:
    assert Report((Check("a", "ok", ""), Check("b", "warning", ""))).ok
    assert not Report((Check("a", "ok", ""), Check("b", "problem", ""))).ok
