"""Finding devices without waking them.

NVML counts and names devices without the CUDA runtime, so that a parent process may look and still fork. It
knows nothing of CUDA's device order and of MIG slices; where its answer could differ from CUDA's, torch is
asked instead, which initialises the runtime but makes no context.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch

from portable_dit.capabilities import Device
from portable_dit_cuda.chips import Capability, arch_name

BACKEND = "cuda"


@dataclass(frozen=True)
class Board:
    """One device as a management library describes it, before CUDA numbers it."""

    uuid: str
    name: str
    capability: Capability
    total_bytes: int


def absence() -> str | None:
    """Why there is no device, or None when there is one."""
    if torch.version.hip is not None:
        return f"torch {torch.__version__} is a ROCm build; its devices belong to backend rocm"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA. Install a CUDA build of torch"
    if devices():
        return None
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} leaves no device that works"
    return f"torch {torch.__version__} finds no device: no card, or no driver for CUDA {torch.version.cuda}"


def devices() -> list[Device]:
    """The devices in CUDA's order; [] when there are none. Makes no context."""
    if torch.version.cuda is None or torch.version.hip is not None:
        return []
    boards = _boards_in_cuda_order()
    if boards is not None:
        driver = _driver_version()
        return [
            Device(BACKEND, i, f"cuda:{i}", b.name, arch_name(b.capability), b.total_bytes, driver)
            for i, b in enumerate(boards)
        ]
    found = []
    for index in range(torch.cuda.device_count()):
        it = torch.cuda.get_device_properties(index)
        arch = arch_name((it.major, it.minor))
        found.append(Device(BACKEND, index, f"cuda:{index}", it.name, arch, it.total_memory))
    return found


def visible(boards: Sequence[Board], environment: Mapping[str, str]) -> Sequence[Board] | None:
    """The boards that CUDA will number 0, 1, ..., in that order; None when these data cannot tell.

    boards: in PCI bus order. CUDA puts the fastest first unless CUDA_DEVICE_ORDER says otherwise, which is
    the same only where all are alike. An entry that it cannot read ends CUDA_VISIBLE_DEVICES.
    """
    by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    alike = len({(b.name, b.capability, b.total_bytes) for b in boards}) <= 1
    if not (by_bus or alike):
        return None
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return boards
    found: list[Board] = []
    for entry in (part.strip() for part in listed.split(",")):
        if entry.startswith("MIG-"):
            return None
        matching = [b for b in boards if entry.startswith("GPU-") and b.uuid.startswith(entry)]
        if entry.isdecimal() and int(entry) < len(boards):
            matching = [boards[int(entry)]]
        if len(matching) != 1 or matching[0] in found:
            break
        found += matching
    return found


def _boards_in_cuda_order() -> Sequence[Board] | None:
    with _nvml() as nvml:
        if nvml is None:
            return None
        try:
            boards = [_board(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
            sliced = any(_is_sliced(nvml, index) for index in range(len(boards)))
        except nvml.NVMLError:
            return None
    return None if sliced else visible(boards, os.environ)


def _board(nvml: ModuleType, index: int) -> Board:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    total = nvml.nvmlDeviceGetMemoryInfo(handle).total
    return Board(
        _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle)), (major, minor), total
    )


def _is_sliced(nvml: ModuleType, index: int) -> bool:
    """Whether MIG is on; cards without it answer with an error."""
    try:
        return bool(nvml.nvmlDeviceGetMigMode(nvml.nvmlDeviceGetHandleByIndex(index))[0])
    except nvml.NVMLError:
        return False


def _driver_version() -> str | None:
    with _nvml() as nvml:
        return None if nvml is None else _text(nvml.nvmlSystemGetDriverVersion())


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # older bindings give bytes


@contextmanager
def _nvml() -> Iterator[ModuleType | None]:
    """NVML's Python binding, initialised; None where the binding or the driver is missing."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
