"""Identity: a backend says what it is, the same each time, and disturbs nothing by being there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from portable_dit.backend import Backend
from portable_dit.capabilities import (
    AttentionRequest,
    Capabilities,
    Device,
    FusionRequest,
    Kernel,
    LinearRequest,
    Request,
)
from portable_dit.conformance.outcome import Outcome, Promises
from portable_dit.formats import QUANTIZED

BLOCK = 64 << 20  # bytes of the allocation that memory figures must see
HEAD_DIMS = (64, 128)
# What a process is before and after a backend's package is imported and asked for devices.
STATE = """
import json, os, random, sys
import numpy, torch
def state():
    return {"default dtype": str(torch.get_default_dtype()),
            "default device": str(torch.get_default_device()),
            "torch's random numbers": hash(bytes(torch.get_rng_state().tolist())),
            "Python's random numbers": hash(random.getstate()), "environment": dict(os.environ),
            "gradients": torch.is_grad_enabled(), "threads": torch.get_num_threads(),
            "numpy's random numbers": hash(numpy.random.get_state()[1].tobytes())}
before = state()
from portable_dit.plugins import load_plugins
plugins = load_plugins()
backend = plugins.backends.get(sys.argv[1])
first = backend.devices() if backend else None
same = backend is not None and first == backend.devices()
changed = [name for name, value in state().items() if value != before[name]]
print(json.dumps({"found": backend is not None, "same": same, "changed": changed}))
"""


def check_identity(backend: Backend, device: Device, capabilities: Capabilities) -> list[Outcome]:
    """Devices, capabilities and memory are told truly, and importing the package changes nothing."""
    told = Promises("identity", backend.id)
    told.check("import_changes_nothing", lambda: _import_trouble(backend))
    told.check("devices", lambda: _devices_trouble(backend))
    told.check("capabilities", lambda: _capabilities_trouble(backend, device, capabilities))
    for name in sorted(capabilities.dtypes):
        told.check("computes", lambda name=name: _product_trouble(device, name), dtype=name)  # type: ignore[misc]
    told.check("native_formats", lambda: _formats_trouble(backend, capabilities))
    told.check("kernel_ids", lambda: _ids_trouble(backend))
    told.check("checks_are_pure", lambda: _checks_trouble(backend, capabilities))
    told.check("memory", lambda: _memory_trouble(backend, device, capabilities))
    told.check("peak", lambda: _peak_trouble(backend, device))
    return told.outcomes


def _import_trouble(backend: Backend) -> str | None:
    """In a process of its own, since this one has imported it already."""
    done = subprocess.run(
        [sys.executable, "-c", STATE, backend.id],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode != 0:
        return f"the process died: {done.stderr.strip().splitlines()[-1] if done.stderr else done.returncode}"
    found = json.loads(done.stdout.splitlines()[-1])
    if not found["found"]:
        return "a fresh process does not find this backend among the installed plugins"
    if not found["same"]:
        return "devices() does not answer the same twice"
    return f"changes {', '.join(found['changed'])}" if found["changed"] else None


def _devices_trouble(backend: Backend) -> str | None:
    devices = backend.devices()
    if [d.index for d in devices] != list(range(len(devices))):
        return f"indices {[d.index for d in devices]}, must be 0, 1, ..."
    for device in devices:
        if device.backend != backend.id:
            return f"device {device.index} says it belongs to {device.backend!r}"
        if not (device.name and device.arch and device.total_bytes > 0):
            return f"device {device.index} has no name, no arch or no memory: {device}"
        where = torch.empty(1, device=device.torch_device).device
        if where != torch.device(device.torch_device) and where.type != "cpu":
            return f"a tensor made on {device.torch_device} lies on {where}"
    return (
        None
        if backend.absence() is None
        else f"absence() explains devices that are here: {backend.absence()}"
    )


def _capabilities_trouble(backend: Backend, device: Device, capabilities: Capabilities) -> str | None:
    again = backend.capabilities(device)
    if again != capabilities:
        return "capabilities() does not answer the same twice"
    if capabilities.device != device:
        return f"capabilities are of {capabilities.device.name}, asked for {device.name}"
    # Several processes can share the host's processor, not a device.
    if not capabilities.host_shares_memory and capabilities.count != len(backend.devices()):
        return f"count {capabilities.count}, and there are {len(backend.devices())} devices"
    unknown = [
        name for name in capabilities.dtypes if not isinstance(getattr(torch, name, None), torch.dtype)
    ]
    if unknown:
        return f"torch has no dtype {unknown[0]!r}"
    if "float32" not in capabilities.dtypes:
        return "float32 is not among the dtypes; norms and schedules need it"
    if capabilities.float64:
        torch.zeros(1, dtype=torch.float64, device=device.torch_device)
    return None


def _product_trouble(device: Device, dtype: str) -> str | None:
    """16 x 16 ones, whose product is 16 in any dtype."""
    ones = torch.ones(16, 16, dtype=getattr(torch, dtype), device=device.torch_device)
    product = (ones @ ones).float().cpu()
    return None if bool((product == 16).all()) else f"16 ones add up to {product[0, 0].item()}"


def _formats_trouble(backend: Backend, capabilities: Capabilities) -> str | None:
    """A format that is native without a kernel would be dequantised, and be slower than what it replaces."""
    unknown = capabilities.native_formats - set(QUANTIZED)
    if unknown:
        return f"{sorted(unknown)[0]} is no format; known are {', '.join(QUANTIZED)}"
    lists = backend.kernel_lists().linear
    for name in sorted(capabilities.native_formats):
        requests = [LinearRequest(name, d, 4096, 4096, 4096) for d in sorted(capabilities.dtypes)]
        native = [k for k in lists[name] if getattr(k, "quantizes_input", False) and k.id != "emulated"]
        if not any(k.check(r, capabilities) is None for k in native for r in requests):
            return f"{name} is called native, and no kernel takes it at 4096 x 4096"
    return None


def _ids_trouble(backend: Backend) -> str | None:
    lists = backend.kernel_lists()
    for what, kernels in (("attention", lists.attention), *lists.linear.items(), *lists.fused.items()):
        ids = [kernel.id for kernel in kernels]
        twice = sorted({id for id in ids if ids.count(id) > 1})
        if twice:
            return f"{what}: two kernels are called {twice[0]!r}"
    return None


def _checks_trouble(backend: Backend, capabilities: Capabilities) -> str | None:
    """The plan asks kernels of data alone: the same question has the same answer, and none of them raises."""
    lists = backend.kernel_lists()
    asked: list[tuple[Kernel, Request]] = []
    for dtype in ("float32", "bfloat16", "float16"):
        asked += [
            (kernel, AttentionRequest(dtype, dim, 8, 8, 1024, mask))
            for kernel in lists.attention
            for dim in HEAD_DIMS
            for mask in ("none", "causal", "key_padding", "segments", "causal_with_full_spans")
        ]
        asked += [
            (kernel, LinearRequest(name, dtype, 1024, width, width))
            for name, kernels in lists.linear.items()
            for kernel in kernels
            for width in (1024, 1000, 77)
        ]
        asked += [
            (kernel, FusionRequest(op, dtype, channels))
            for op, kernels in lists.fused.items()
            for kernel in kernels
            for channels in (1024, 77)
        ]
    for kernel, request in asked:
        first = kernel.check(request, capabilities)
        if kernel.check(request, capabilities) != first:
            return f"{kernel.id} answers {request} in two ways"
        if first is not None and not (first.code and first.detail):
            return f"{kernel.id} refuses {request} without a reason"
    return None


def _memory_trouble(backend: Backend, device: Device, capabilities: Capabilities) -> str | None:
    """Free is at most total, and, where memory is the device's own, falls when some is taken."""
    before = backend.memory(device)
    if before is None:
        return None
    free, total = before
    if not 0 <= free <= total:
        return f"{free} bytes free of {total}"
    if abs(total - device.total_bytes) > 0.1 * device.total_bytes:
        return f"{total} bytes in all, and the device says {device.total_bytes}"
    if capabilities.host_shares_memory:
        return None  # other programs come and go
    block = torch.ones(BLOCK, dtype=torch.uint8, device=device.torch_device)
    backend.synchronize(device)
    during = backend.memory(device)
    assert during is not None
    del block
    if free - during[0] < BLOCK // 2:
        return f"{BLOCK} bytes were taken, and {free - during[0]} fewer are free"
    backend.trim(device)
    after = backend.memory(device)
    assert after is not None
    return None if after[0] - during[0] >= BLOCK // 2 else "memory that was let go is not free again"


def _peak_trouble(backend: Backend, device: Device) -> str | None:
    if backend.peak_bytes(device, reset=True) is None:
        return None
    before = backend.peak_bytes(device) or 0
    block = torch.ones(BLOCK, dtype=torch.uint8, device=device.torch_device)
    backend.synchronize(device)
    del block
    after = backend.peak_bytes(device, reset=True) or 0
    return (
        None
        if after - before >= BLOCK // 2
        else f"{BLOCK} bytes were taken, and the peak rose by {after - before}"
    )
