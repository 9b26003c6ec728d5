"""Detection: what the backend says of a machine that has no device, and how it reads one that has."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from portable_dit_cuda import CudaBackend, chips, device
from portable_dit_cuda.device import Board, visible
from vendor_stand_ins import SIGNATURES, build

from portable_dit.capabilities import Device
from portable_dit.errors import BackendError

PACKAGE = Path(__file__).parents[1]
without_device = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device")


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which the package is installed as a plugin."""
    info = tmp_path / "portable_dit_cuda-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: portable-dit-cuda\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[portable_dit.backends]\ncuda = portable_dit_cuda\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{PACKAGE}"}


def call(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@without_device
def test_the_command_line_shows_the_backend_and_why_it_has_no_device(installed):
    listed = call(installed, "-m", "portable_dit", "backends", "--json")
    assert listed.returncode == 0, listed.stderr
    status = {s["name"]: s for s in json.loads(listed.stdout)["plugins"]}["cuda"]
    assert status["ok"]
    assert status["devices"] == []
    assert "built without CUDA" in status["reason"] or "finds no device" in status["reason"]
    shown = call(installed, "-m", "portable_dit", "backends")
    assert status["reason"] in shown.stdout


@without_device
def test_importing_and_asking_changes_nothing(installed):
    code = (
        "import torch, random\n"
        "before = torch.get_rng_state(), torch.get_default_dtype()\n"
        "from portable_dit_cuda import CudaBackend\n"
        "assert CudaBackend().devices() == CudaBackend().devices() == []\n"
        "assert torch.equal(torch.get_rng_state(), before[0]) and torch.get_default_dtype() is before[1]\n"
        "assert not torch.cuda.is_initialized()\n"
        "import sys; assert 'triton' not in sys.modules and 'pynvml' not in sys.modules\n"
    )
    done = call(installed, "-c", code)
    assert done.returncode == 0, done.stderr


@without_device
def test_the_probe_of_a_machine_without_a_device_says_so(installed):
    done = call(installed, "-m", "portable_dit_cuda")
    assert done.returncode == 0, done.stderr
    assert "no device:" in done.stdout


def test_a_build_for_another_vendor_has_no_devices(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert CudaBackend().devices() == []
    assert "rocm" in device.absence()


BOARDS = tuple(Board(f"GPU-{c}0", "NVIDIA H200", (9, 0), 1 << 37) for c in "abc")
MIXED = (*BOARDS, Board("GPU-d0", "NVIDIA A10", (8, 6), 1 << 34))


@pytest.mark.parametrize(
    ("boards", "environment", "uuids"),
    [
        (BOARDS, {}, "abc"),
        (BOARDS, {"CUDA_VISIBLE_DEVICES": "2,0"}, "ca"),
        (BOARDS, {"CUDA_VISIBLE_DEVICES": "GPU-b"}, "b"),
        (BOARDS, {"CUDA_VISIBLE_DEVICES": ""}, ""),
        (BOARDS, {"CUDA_VISIBLE_DEVICES": "1,-1,2"}, "b"),  # CUDA stops at the first that it cannot read
        (BOARDS, {"CUDA_VISIBLE_DEVICES": "7"}, ""),
        (BOARDS, {"CUDA_VISIBLE_DEVICES": "MIG-1234"}, None),
        (MIXED, {}, None),  # CUDA puts the fastest first, which these data do not say
        (MIXED, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "3"}, "d"),
    ],
)
def test_boards_are_numbered_as_the_environment_makes_cuda_number_them(boards, environment, uuids):
    found = visible(boards, environment)
    assert found is None if uuids is None else "".join(b.uuid[4] for b in found) == uuids


@pytest.mark.parametrize(
    ("capability", "toolkit", "formats"),
    [
        ((7, 5), (13, 0), set()),
        ((8, 0), (13, 0), {"int8_row"}),
        ((8, 9), (13, 0), {"int8_row", "fp8_row", "fp8_tensor"}),
        ((9, 0), (12, 8), {"int8_row", "fp8_row", "fp8_tensor"}),
        ((9, 0), (13, 0), {"int8_row", "fp8_row", "fp8_tensor", "fp8_block128"}),
        ((10, 0), (13, 0), {"int8_row", "fp8_row", "fp8_tensor", "mxfp8"}),
        ((12, 0), (12, 8), {"int8_row", "fp8_row", "fp8_tensor", "mxfp8"}),
    ],
)
def test_formats_follow_the_chip_and_the_toolkit(capability, toolkit, formats):
    assert chips.native_formats(capability, toolkit) == formats


def test_recorded_machines_agree_with_the_chip_tables(machine):
    for name in ("h100", "h200", "rtx-5090"):
        recorded = machine(name)
        capability = chips.capability_of(recorded)
        assert chips.native_formats(capability, (13, 0)) == recorded.native_formats
        assert chips.dtypes(capability) == recorded.dtypes
        assert chips.rates(recorded.device.name).compute == recorded.compute
        assert chips.rates(recorded.device.name).bandwidth == recorded.memory_bandwidth
        assert recorded.runtime_bytes == chips.RUNTIME_BYTES


def test_what_torch_has_here_takes_the_arguments_that_were_recorded():
    import torch.nn.functional as F

    for name, function in (
        ("torch.nn.functional.scaled_mm", F.scaled_mm),
        ("torch.cuda.graph", torch.cuda.graph.__init__),
    ):
        recorded = inspect.signature(build(SIGNATURES[name]["signature"], lambda given: None)).parameters
        here = inspect.signature(function).parameters
        assert [n for n in here if n in recorded] == list(recorded), name
        added = [p for n, p in here.items() if n not in recorded and n != "self"]
        assert all(p.default is not p.empty for p in added)


def test_a_memory_limit_leaves_the_allocator_what_the_context_does_not_take(monkeypatch):
    total = 80 << 30
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (total, total))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, index: shares.append(share)
    )
    board = Device("cuda", 0, "cuda:0", "NVIDIA H100", "sm_90", total, None)
    assert CudaBackend().limit_memory(board, 24 << 30)
    assert shares[0] * total == pytest.approx((24 << 30) - chips.RUNTIME_BYTES)
    for refused in (chips.RUNTIME_BYTES, total + 1):
        with pytest.raises(BackendError, match="must be above"):
            CudaBackend().limit_memory(board, refused)
