"""Finding NPUs, and why there are none.

torch_npu is the only way to ask, and importing it has effects: it takes torch's place for out-of-tree devices
under the name npu, needs CANN's libraries, and refuses a process in which another accelerator is live. As a
rule torch has loaded it by itself already. So it is imported here only where it is installed, fits this torch
and is not loaded yet, and whatever it says is kept as the reason.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from portable_dit.capabilities import Device

BACKEND = "ascend"
MODULE = "torch_npu"
# What importing it was seen to raise: no CANN, a CANN of another version, another accelerator in use.
FAULTS = (ImportError, OSError, RuntimeError)

# get_soc_version() in ranges (torch_npu 2.13.0, csrc/core/npu/NpuVariables.h): first number, family.
FAMILIES: tuple[tuple[int, str], ...] = (
    (260, "950"),  # A5: Atlas 350
    (250, "910_93"),  # A3: Atlas 800T A3
    (240, "310B"),
    (220, "910B"),  # A2: Atlas 800I A2, 800T A2
    (200, "310P"),
    (100, "910"),
)
SERVED = ("910B", "910_93", "950")
MXFP8_FROM = "950"
RUNTIME_BYTES = 1500 * 2**20  # CANN with its operator libraries, before the first tensor


def npu() -> Any | None:
    """torch.npu, once torch_npu is imported; None where that is not possible."""
    return None if _import_fault() else torch.npu  # type: ignore[attr-defined]


def absence() -> str | None:
    """Why there is no device, or None when there is one."""
    fault = _import_fault()
    if fault is not None:
        return fault
    if devices():
        return None
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if visible is not None:
        return f"ASCEND_RT_VISIBLE_DEVICES={visible!r} leaves no device"
    return f"torch_npu {_installed()} finds no device. Look at what `npu-smi info` says of cards and driver"


def devices() -> list[Device]:
    """The devices in torch_npu's order; [] when there are none."""
    runtime = npu()
    if runtime is None or not runtime.is_available():
        return []
    arch, driver = arch_name(int(runtime.get_soc_version())), _cann()
    found = []
    for index in range(runtime.device_count()):
        name, total = runtime.get_device_name(index), int(runtime.get_device_properties(index).total_memory)
        found.append(Device(BACKEND, index, f"npu:{index}", name, arch, total, driver))
    return found


def arch_name(soc: int) -> str:
    """The family of a SoC number: 224 -> "910B"."""
    return next((name for first, name in FAMILIES if soc >= first), f"soc{soc}")


def dtypes(arch: str) -> frozenset[str]:
    """Activation types that the chips of a family compute in."""
    return frozenset({"float32", "float16"} | ({"bfloat16"} if arch in SERVED else set()))


def native_formats(arch: str) -> frozenset[str]:
    """Formats that its matrix units take."""
    if arch not in SERVED:
        return frozenset()
    return frozenset({"int8_row"} | ({"mxfp8"} if arch == MXFP8_FROM else set()))


@cache
def _import_fault() -> str | None:
    """Why torch_npu cannot be used in this process, None when it is imported."""
    if MODULE in sys.modules and hasattr(torch, "npu"):
        return None
    found = _installed()
    if found is None:
        return (
            "torch_npu is not installed. On a machine with the driver and CANN: "
            "pip install 'portable-dit-ascend[npu]', or pip install './backends/ascend[npu]' in a clone"
        )
    if found.split(".")[:3] != torch.__version__.split("+")[0].split(".")[:3]:
        return (
            f"torch_npu {found} works with torch {'.'.join(found.split('.')[:3])} alone, and this is "
            f"{torch.__version__}. Install the two of one number"
        )
    try:
        import_module(MODULE)
    except FAULTS as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        advice = "source CANN's set_env.sh first" if "ASCEND_HOME_PATH" not in os.environ else "see its log"
        return f"torch_npu {found} is installed and cannot be imported: {first}. {advice.capitalize()}"
    return None


def _installed() -> str | None:
    try:
        return version("torch-npu")  # metadata takes a hyphen and an underscore for the same
    except PackageNotFoundError:
        return None


def _cann() -> str | None:
    """CANN's version as its environment says; there is no call for it that wakes no device."""
    home = os.environ.get("ASCEND_HOME_PATH")
    return None if home is None else f"CANN {os.path.basename(os.path.realpath(home))}"
