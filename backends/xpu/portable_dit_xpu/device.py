"""Finding XPU devices, and what each of them can do.

Every build of torch has the names of torch.xpu, also the ones for other devices, where they raise or answer
no. So nothing is concluded from a name that exists: the build says whether it was compiled for XPU, the
version says what came when, and the device's own properties say the rest.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from portable_dit.capabilities import Device

BACKEND = "xpu"
Version = tuple[int, int]

# SYCL names an architecture by the GMD id of its graphics IP: major << 22 | minor << 14 | revision, times 256
# (sycl_ext_oneapi_device_architecture; Linux, drivers/gpu/drm/xe). 0x30f000700 is 12.60.7, a Data Center Max.
FAMILIES: tuple[tuple[Version, Version, str], ...] = (
    ((12, 55), (12, 59), "acm"),  # Arc A
    ((12, 60), (12, 61), "pvc"),  # Data Center GPU Max
    ((12, 70), (12, 74), "mtl"),  # Core Ultra 1, and 2 for desktops
    ((20, 1), (20, 3), "bmg"),  # Arc B, Arc Pro B
    ((20, 4), (20, 4), "lnl"),  # Core Ultra 2 for thin machines
    ((30, 0), (30, 9), "ptl"),  # Core Ultra 3
)
FLASH_REFUSES = ("pvc",)  # its SYCL-TLA kernels were reported wrong there
NATIVE_FP8_FROM: Version = (35, 0)  # Xe3P; the XMX units before it take float16, bfloat16, tf32 and int8
RUNTIME_BYTES = 500 * 2**20  # driver and oneDNN, before the first tensor


def torch_version() -> Version:
    """(2, 13) of "2.13.0+xpu"."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def absence() -> str | None:
    """Why there is no device, or None when there is one."""
    if not torch.xpu._is_compiled():
        return (
            f"torch {torch.__version__} was built without XPU. Install the build that pytorch.org names for "
            "Intel GPUs"
        )
    if devices():
        return None
    mask = os.environ.get("ZE_AFFINITY_MASK")
    if mask is not None:
        return f"ZE_AFFINITY_MASK={mask!r} leaves no device"
    return (
        f"torch {torch.__version__} finds no device: no card, no Level Zero driver, or no right to use "
        "/dev/dri"
    )


def devices() -> list[Device]:
    """The devices in torch's order; [] when there are none."""
    if not torch.xpu._is_compiled():
        return []
    found = []
    for index in range(torch.xpu.device_count()):
        it = properties(index)
        driver = getattr(it, "driver_version", None)
        found.append(
            Device(BACKEND, index, f"xpu:{index}", it.name, arch_of(it), int(it.total_memory), driver)
        )
    return found


def properties(index: int) -> Any:
    """What torch knows of a device. Some fields came with later versions of torch."""
    return torch.xpu.get_device_properties(index)


def arch_of(it: Any) -> str:
    """The family's name, else its IP version: "bmg", "xe35.11", "unknown" where torch does not say."""
    architecture = getattr(it, "architecture", None)
    return "unknown" if architecture is None else arch_name(ip_version(architecture))


def ip_version(architecture: int) -> Version:
    """0x30f000700 -> (12, 60)."""
    gmd = architecture >> 8
    return gmd >> 22, (gmd >> 14) & 0xFF


def arch_name(version: Version) -> str:
    """The family that an IP version belongs to: (20, 2) -> "bmg"."""
    for first, last, name in FAMILIES:
        if first <= version <= last:
            return name
    return f"xe{version[0]}.{version[1]}"


def dtypes(it: Any) -> frozenset[str]:
    """Activation types that the device computes in without emulation."""
    found = {"float32"}
    if getattr(it, "has_fp16", False):
        found.add("float16")
    if getattr(it, "has_bfloat16_conversions", False) or has_matrix_units(it):
        found.add("bfloat16")
    return frozenset(found)


def has_matrix_units(it: Any) -> bool:
    """Whether it has XMX."""
    return bool(getattr(it, "has_subgroup_matrix_multiply_accumulate", False))


def native_formats(it: Any, version: Version) -> frozenset[str]:
    """Formats that the XMX units take through a torch of that version.

    torch multiplies fp8 on older chips too, expanded inside oneDNN. That saves no time over expanding the
    weight alone, which leaves the input exact.
    """
    if not has_matrix_units(it):
        return frozenset()
    found = {"int8_row"}  # torch._int_mm is on XPU since torch 2.9
    architecture = getattr(it, "architecture", None)
    if architecture is not None and ip_version(architecture) >= NATIVE_FP8_FROM:
        found |= {"fp8_row", "fp8_tensor"}  # F.scaled_mm by row and tensor, since torch 2.10
        if version >= (2, 14):
            found.add("mxfp8")  # blocks of 32, scales in plain order
    return frozenset(found)
