"""The backend: devices and capabilities, graphs, and the lists of kernels, best first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from portable_dit import host
from portable_dit.accelerator import AcceleratorBackend, GraphStyle
from portable_dit.backend import AttentionKernel, FusedOp, LinearKernel
from portable_dit.capabilities import Capabilities, CollectiveLimits, Device, GraphLimits
from portable_dit.scaled_products import (
    Int8RowLinear,
    ScaledBlocksOf32Linear,
    ScaledRowLinear,
    ScaledTensorLinear,
)
from portable_dit_xpu import attention, device, extension

GRAPHS_FROM = (2, 11)  # the first torch with torch.xpu.XPUGraph


class XpuBackend(AcceleratorBackend):
    """Intel GPUs through torch.xpu."""

    id = "xpu"
    api_version = 1
    device_type = "xpu"

    def devices(self) -> list[Device]:
        return device.devices()

    def absence(self) -> str | None:
        return device.absence()

    def capabilities(self, device: Device) -> Capabilities:
        return describe(device, count=len(self.devices()))

    def graph_style(self) -> GraphStyle | None:
        if device.torch_version() < GRAPHS_FROM:
            return None
        return GraphStyle("XPUGraph")

    def attention_kernels(self) -> Sequence[AttentionKernel]:
        return attention.KERNELS

    def linear_kernels(self) -> Mapping[str, Sequence[LinearKernel]]:
        return {
            "int8_row": (Int8RowLinear(),),
            "fp8_row": (ScaledRowLinear(),),
            "fp8_tensor": (ScaledTensorLinear(),),
            "mxfp8": (ScaledBlocksOf32Linear(),),
        }

    def fused_ops(self) -> Mapping[str, Sequence[FusedOp]]:
        return {op.op: [op] for op in extension.FUSED_OPS}


def describe(found: Device, *, count: int) -> Capabilities:
    """What a device can do, by its properties and the version of torch."""
    it, version = device.properties(found.index), device.torch_version()
    ipex = extension.usable()
    shared = bool(getattr(it, "is_integrated_gpu", False))
    return Capabilities(
        device=found,
        count=count,
        dtypes=device.dtypes(it),
        native_formats=device.native_formats(it, version),
        float64=bool(it.has_fp64),  # Arc has none
        pinned_memory=not shared,
        async_copy=True,
        host_shares_memory=shared,
        # Capture spreads to no second queue and takes no collective (vllm#53993, pytorch#196490).
        graphs=GraphLimits(supported=version >= GRAPHS_FROM),
        collectives=CollectiveLimits("xccl"),
        libraries={} if ipex is None else {extension.NAME: ipex},
        host_bytes=host.memory()[1],
        runtime_bytes=device.RUNTIME_BYTES,
    )
