"""The backend: devices and capabilities, graphs, and the lists of kernels, best first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from portable_dit import host
from portable_dit.accelerator import AcceleratorBackend, GraphStyle
from portable_dit.backend import AttentionKernel, FusedOp, LinearKernel
from portable_dit.capabilities import Capabilities, CollectiveLimits, Device, GraphLimits
from portable_dit.errors import BackendError
from portable_dit_musa import attention, chips, device
from portable_dit_musa.fusions import FUSED_OPS
from portable_dit_musa.linear import linear_kernels
from portable_dit_musa.probe import probe_mate


class MusaBackend(AcceleratorBackend):
    """Moore Threads devices through torch_musa."""

    id = "musa"
    api_version = 1
    device_type = "musa"

    def devices(self) -> list[Device]:
        return device.devices()

    def absence(self) -> str | None:
        return device.absence()

    def capabilities(self, device: Device) -> Capabilities:
        """Calls MATE once, the first time."""
        mate = probe_mate(device.index, device.arch)
        libraries = {} if mate.version is None else {chips.MATE: mate.version}
        return Capabilities(
            device=device,
            count=len(self.devices()),
            dtypes=chips.dtypes(device.arch),
            native_formats=chips.native_formats(device.arch, frozenset(libraries)),
            float64=False,
            pinned_memory=True,
            async_copy=True,
            # Captures of side streams and collectives are not documented; some kernels allocate in one.
            graphs=GraphLimits(supported=True, max_live=chips.MAX_LIVE_GRAPHS),
            collectives=CollectiveLimits("mccl"),
            libraries=libraries,
            host_bytes=host.memory()[1],
            runtime_bytes=chips.RUNTIME_BYTES,
        )

    def process_group(self, device: Device) -> dict[str, Any]:
        too_old = chips.refuse_arch(device.arch, chips.FLASH_FROM)
        if too_old is not None:
            raise BackendError(
                f"{device.name}: torch_musa has no mccl on this chip ({too_old.detail}), so its devices "
                "cannot work together. Run one process for each, with layout 1."
            )
        return super().process_group(device)

    def graph_style(self) -> GraphStyle:
        # thread_local: a thread that encodes a picture may use the device while this one captures.
        return GraphStyle("MUSAGraph", {"capture_error_mode": "thread_local"})

    def attention_kernels(self) -> Sequence[AttentionKernel]:
        return attention.KERNELS

    def linear_kernels(self) -> Mapping[str, Sequence[LinearKernel]]:
        return linear_kernels()

    def fused_ops(self) -> Mapping[str, Sequence[FusedOp]]:
        return {op.op: [op] for op in FUSED_OPS}
