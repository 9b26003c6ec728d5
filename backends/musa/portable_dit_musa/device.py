"""Finding MUSA devices.

torch knows them through torch_musa, which torch imports by itself where it is installed. Where that is
switched off, it is imported here when devices are asked for; nothing else can see them. torchada, which makes
CUDA programs run by rewriting torch, is not needed and not used.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from portable_dit.capabilities import Device
from portable_dit_musa.chips import arch_name

BACKEND = "musa"
PACKAGE = "torch_musa"
# What the package raises where the driver, the toolkit or its build of torch is missing.
FAULTS = (ImportError, OSError, RuntimeError)


def absence() -> str | None:
    """Why there is no device, or None when there is one."""
    fault = load_fault()
    if fault is not None:
        return fault
    if devices():
        return None
    visible = os.environ.get("MUSA_VISIBLE_DEVICES")
    if visible is not None:
        return f"MUSA_VISIBLE_DEVICES={visible!r} leaves no device that works"
    return f"torch_musa with torch {torch.__version__} finds no device: no card, or no driver for it"


@cache
def load_fault() -> str | None:
    """Why torch does not know the device here, None when it does."""
    if hasattr(torch, "musa"):
        return None
    if find_spec(PACKAGE) is None:
        return (
            f"{PACKAGE} is not installed. It comes with the vendor's own build of torch, from "
            "github.com/MooreThreads/torch_musa or its docker images, not from the Python index"
        )
    try:
        import_module(PACKAGE)
    except FAULTS as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"{PACKAGE} is installed and cannot be imported ({text}). Install the toolkit it was built for"
    return (
        None
        if hasattr(torch, "musa")
        else f"{PACKAGE} is installed and brings no torch.musa; is it the right one?"
    )


def devices() -> list[Device]:
    """The devices in torch's order; [] when there are none. Makes no context."""
    if load_fault() is not None:
        return []
    module = torch.get_device_module(BACKEND)
    found = []
    for index in range(module.device_count()):
        it = module.get_device_properties(index)
        arch = arch_name((it.major, it.minor))
        found.append(Device(BACKEND, index, f"musa:{index}", it.name, arch, it.total_memory))
    return found
