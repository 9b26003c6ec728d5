"""Finding ROCm devices. torch calls them "cuda", so it is the build of torch that tells the vendors apart."""

from __future__ import annotations

import os

import torch

from portable_dit.capabilities import Device
from portable_dit_rocm.chips import arch_name

BACKEND = "rocm"
# The HIP runtime reads the first two, torch the third; ranks of one host need all that are set to agree.
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def absence() -> str | None:
    """Why there is no device, or None when there is one."""
    if torch.version.hip is None:
        return (
            f"torch {torch.__version__} was built without ROCm. Install the build that pytorch.org names for "
            "your ROCm"
        )
    if devices():
        return None
    set_here = [f"{name}={os.environ[name]!r}" for name in VISIBLE if name in os.environ]
    if set_here:
        return f"{', '.join(set_here)} leaves no device that works"
    return (
        f"torch {torch.__version__} finds no device: no card, no driver for ROCm {torch.version.hip}, or no "
        "right to use /dev/kfd and /dev/dri (groups render and video)"
    )


def devices() -> list[Device]:
    """The devices in torch's order; [] when there are none. Makes no context."""
    if torch.version.hip is None:
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        it = torch.cuda.get_device_properties(index)
        arch = arch_name(it.gcnArchName)
        found.append(Device(BACKEND, index, f"cuda:{index}", it.name, arch, it.total_memory))
    return found
