"""What kernels say of requests and chips: pure, without any machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from portable_dit_musa import MusaBackend, chips
from portable_dit_musa.attention import MATE_ATTENTION, MUDNN_ATTENTION
from portable_dit_musa.linear import MateLinear, ScaledLinear

from portable_dit.capabilities import AttentionRequest, LinearRequest
from portable_dit.catalog import read_spec
from portable_dit.errors import BackendError
from portable_dit.plan import make_plan
from portable_dit.recipe import Recipe

PACKAGE = Path(__file__).parents[1]
MATE = {"mate": "e65c501"}


@pytest.mark.parametrize(
    ("capability", "arch", "dtypes", "formats"),
    [
        ((2, 1), "mp_21", {"float32", "float16"}, set()),
        ((2, 2), "mp_22", {"float32", "float16", "bfloat16"}, set()),
        ((3, 1), "mp_31", {"float32", "float16", "bfloat16"}, {"fp8_row", "fp8_tensor", "fp8_block128"}),
    ],
)
def test_what_a_chip_can_do_follows_its_capability(capability, arch, dtypes, formats):
    assert chips.arch_name(capability) == arch
    assert chips.version_of(arch) == capability
    assert chips.dtypes(arch) == dtypes
    assert chips.native_formats(arch, frozenset({"mate"})) == formats


def test_the_recorded_machine_agrees_with_the_chip_tables(machine):
    recorded = machine("s5000")
    assert chips.native_formats(recorded.device.arch, frozenset()) == recorded.native_formats
    assert chips.dtypes(recorded.device.arch) == recorded.dtypes
    assert recorded.graphs.max_live == chips.MAX_LIVE_GRAPHS
    assert not recorded.graphs.default_on
    assert not recorded.float64
    assert recorded.runtime_bytes == chips.RUNTIME_BYTES


@pytest.mark.parametrize(
    ("kernel", "libraries", "request_", "code"),
    [
        (MATE_ATTENTION, {}, AttentionRequest("bfloat16", 128, 8, 8, 64), "library"),
        (MATE_ATTENTION, MATE, AttentionRequest("float32", 128, 8, 8, 64), "dtype"),
        (MATE_ATTENTION, MATE, AttentionRequest("bfloat16", 264, 8, 8, 64), "head_dim"),
        (MATE_ATTENTION, MATE, AttentionRequest("bfloat16", 64, 8, 8, 64, "causal", return_lse=True), "lse"),
        (MUDNN_ATTENTION, {}, AttentionRequest("bfloat16", 160, 8, 8, 64), "head_dim"),
        (MUDNN_ATTENTION, {}, AttentionRequest("float32", 64, 8, 8, 64), "dtype"),
        (ScaledLinear("fp8_row"), {}, LinearRequest("fp8_row", "bfloat16", 64, 528, 512), "in_features"),
        (ScaledLinear("fp8_row"), {}, LinearRequest("fp8_row", "float32", 64, 512, 512), "dtype"),
        (MateLinear(), {}, LinearRequest("fp8_block128", "bfloat16", 64, 512, 512), "arch"),
    ],
)
def test_a_kernel_refuses_with_the_reason(kernel, libraries, request_, code, machine):
    reject = kernel.check(request_, machine("s5000", **libraries))
    assert reject is not None
    assert reject.code == code


def test_an_older_chip_is_refused_by_its_name(machine):
    from dataclasses import replace

    found = machine("s5000", **MATE)
    s80 = replace(found, device=replace(found.device, arch="mp_21"))
    request = AttentionRequest("float16", 128, 8, 8, 64)
    assert MATE_ATTENTION.check(request, s80).detail == "needs mp_31 or newer, this is mp_21"
    assert MUDNN_ATTENTION.check(request, s80).detail == "needs mp_22 or newer, this is mp_21"


def test_devices_without_mccl_cannot_work_together_and_are_told_so(machine):
    from dataclasses import replace

    s80 = replace(machine("s5000").device, arch="mp_21", name="MTT S80")
    with pytest.raises(BackendError, match=r"MTT S80: torch_musa has no mccl .*needs mp_22.*layout 1"):
        MusaBackend().process_group(s80)


def planned(capabilities, **values):
    recipe = Recipe.model_validate(
        {"model": "h3-image", "weights": "random", "device": {"backend": "musa"}, **values}
    )
    return make_plan(recipe, read_spec(recipe), capabilities, MusaBackend().kernel_lists())


def test_an_s5000_runs_mate_where_it_is_installed_and_mudnn_where_not(machine):
    # One card does not hold the model; what is planned is the same.
    layout = {"offload": {"dit": "layerwise", "text_encoder": "component"}}
    assert planned(machine("s5000", **MATE), **layout).choices("dit")["attention"] == "mate"
    plan = planned(machine("s5000"), quantization={"dit": "fp8_row"}, **layout)
    assert plan.choices("dit")["attention"] == "sdpa_mudnn"
    assert plan.choices("dit")["linear:fp8_row"] == "scaled_mm"
    assert {plan.choices("dit")[op] for op in ("rms_norm", "swiglu")} <= {"mudnn", "plain"}


def call(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*environment.pop("FOLDERS", "").split(os.pathsep), str(PACKAGE)])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


SAY = "from portable_dit_musa import MusaBackend as B; print(B().devices(), B().absence())"


def test_a_machine_without_the_vendors_packages_is_told_where_they_come_from():
    done = call(SAY)
    assert done.returncode == 0, done.stderr
    assert "[] torch_musa is not installed" in done.stdout
    assert "not from the Python index" in done.stdout


def test_a_package_that_cannot_be_imported_is_named_with_its_own_words(tmp_path):
    (tmp_path / "torch_musa.py").write_text("raise OSError('libmusart.so: cannot open shared object file')")
    done = call(SAY, FOLDERS=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "cannot be imported (libmusart.so: cannot open shared object file)" in done.stdout


def test_importing_the_package_imports_nothing_of_the_vendor(tmp_path):
    for name in ("torch_musa", "torchada", "mate"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('imported')")
    done = call("import portable_dit_musa; print('fine')", FOLDERS=str(tmp_path))
    assert done.stdout == "fine\n", done.stderr


def test_a_stack_that_breaks_import_torch_is_explained_by_doctor(tmp_path):
    """As torch_musa without its toolkit does, through the hook by which torch loads device extensions."""
    (tmp_path / "torch_musa.py").write_text("def _autoload(): raise ImportError('libmusart.so is missing')")
    info = tmp_path / "torch_musa-2.7.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_musa\nVersion: 2.7.1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_musa = torch_musa:_autoload\n")
    code = "from portable_dit.cli import main; import sys; sys.argv = ['portable-dit', 'doctor']; main()"
    done = call(code, FOLDERS=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "libmusart.so is missing" in done.stdout
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stdout
