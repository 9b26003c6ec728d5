"""The backend: devices and capabilities, graphs, and the lists of kernels, best first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from portable_dit import host
from portable_dit.accelerator import AcceleratorBackend, GraphStyle
from portable_dit.backend import AttentionKernel, FusedOp, LinearKernel
from portable_dit.capabilities import Capabilities, CollectiveLimits, Device, GraphLimits
from portable_dit_rocm import attention, chips, device
from portable_dit_rocm.fusions import FUSED_OPS
from portable_dit_rocm.linear import linear_kernels
from portable_dit_rocm.probe import probe_libraries


class RocmBackend(AcceleratorBackend):
    """AMD devices through torch.cuda, which is what a ROCm build of torch calls them."""

    id = "rocm"
    api_version = 1
    device_type = "cuda"

    def devices(self) -> list[Device]:
        return device.devices()

    def absence(self) -> str | None:
        return device.absence()

    def capabilities(self, device: Device) -> Capabilities:
        """Calls each installed kernel library once, the first time."""
        probes = probe_libraries(device.index, device.arch)
        libraries = {name: probe.version for name, probe in probes.items() if probe.version is not None}
        rates = chips.rates(device.name)
        return Capabilities(
            device=device,
            count=len(self.devices()),
            dtypes=frozenset({"float32", "bfloat16", "float16"}),
            native_formats=chips.native_formats(device.arch, frozenset(libraries)),
            pinned_memory=True,
            async_copy=True,
            # Two graphs replayed at once hang or corrupt (ROCm/rccl#2179, ROCm/clr#279, ROCm/hip#3902), work
            # on a second stream is captured unreliably, and collectives are refused (ROCm/hip#3876): one
            # replica, one lane, none inside.
            graphs=GraphLimits(supported=True, default_on=True),
            collectives=CollectiveLimits("nccl"),
            libraries=libraries,
            compute=rates.compute,
            memory_bandwidth=rates.bandwidth,
            host_bytes=host.memory()[1],
            runtime_bytes=chips.RUNTIME_BYTES,
        )

    def graph_style(self) -> GraphStyle:
        # thread_local: a thread that encodes a picture may use the device while this one captures.
        return GraphStyle("CUDAGraph", {"capture_error_mode": "thread_local"})

    def attention_kernels(self) -> Sequence[AttentionKernel]:
        return attention.KERNELS

    def linear_kernels(self) -> Mapping[str, Sequence[LinearKernel]]:
        return linear_kernels()

    def fused_ops(self) -> Mapping[str, Sequence[FusedOp]]:
        return {op.op: [op] for op in FUSED_OPS}
