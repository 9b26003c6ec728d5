"""The backend: devices and capabilities, memory, graphs, and the lists of kernels, best first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from portable_dit import host
from portable_dit.accelerator import AcceleratorBackend, GraphStyle
from portable_dit.backend import AttentionKernel, ExpertKernel, FusedOp, LinearKernel
from portable_dit.capabilities import Capabilities, CollectiveLimits, Device, GraphLimits
from portable_dit.errors import BackendError
from portable_dit.piecewise import ChunkedAttention
from portable_dit_cuda import chips, device
from portable_dit_cuda.attention import TORCH_ATTENTION
from portable_dit_cuda.cudnn_attention import CudnnFp8Attention
from portable_dit_cuda.experts import EXPERT_OPS, expert_kernels
from portable_dit_cuda.flash import FA3, FA4, Fa3Fp8Attention, SageAttention
from portable_dit_cuda.fusions import FUSED_OPS
from portable_dit_cuda.host_memory import locked_buffer
from portable_dit_cuda.linear import linear_kernels
from portable_dit_cuda.probe import probe_libraries


class CudaBackend(AcceleratorBackend):
    """NVIDIA devices through torch.cuda."""

    id = "cuda"
    api_version = 1
    device_type = "cuda"

    def devices(self) -> list[Device]:
        return device.devices()

    def absence(self) -> str | None:
        return device.absence()

    def capabilities(self, device: Device) -> Capabilities:
        """Calls each installed kernel library once, the first time."""
        capability = torch.cuda.get_device_capability(device.index)
        toolkit = _toolkit()
        probes = probe_libraries(device.index, capability)
        rates = chips.rates(device.name)
        return Capabilities(
            device=device,
            count=len(self.devices()),
            dtypes=chips.dtypes(capability),
            native_formats=chips.native_formats(capability, toolkit),
            pinned_memory=True,
            async_copy=True,
            graphs=GraphLimits(supported=True, side_streams=True, collectives=True, default_on=True),
            collectives=CollectiveLimits("nccl"),
            libraries={name: p.version for name, p in probes.items() if p.version is not None},
            compute=rates.compute,
            memory_bandwidth=rates.bandwidth,
            host_bytes=host.memory()[1],
            runtime_bytes=chips.RUNTIME_BYTES,
        )

    def limit_memory(self, device: Device, nbytes: int) -> bool:
        """The context with its libraries counts as `chips.RUNTIME_BYTES`; the allocator has what is left."""
        _, total = torch.cuda.mem_get_info(device.index)
        least = chips.RUNTIME_BYTES
        if not least < nbytes <= total:
            raise BackendError(
                f"a limit of {nbytes / 2**30:.2f} GiB: must be above the {least / 2**30:.2f} GiB that a CUDA "
                f"context takes, and at most the {total / 2**30:.2f} GiB of {device.name}."
            )
        torch.cuda.set_per_process_memory_fraction((nbytes - least) / total, device.index)
        return True

    def graph_style(self) -> GraphStyle:
        # thread_local: a thread that encodes a picture may use the device while this one captures.
        return GraphStyle("CUDAGraph", {"capture_error_mode": "thread_local"})

    def host_buffer(self, nbytes: int) -> Tensor:
        return locked_buffer(nbytes)

    def cluster_resources(self) -> Mapping[str, float]:
        return {"GPU": 1.0}

    def attention_kernels(self) -> Sequence[AttentionKernel]:
        by_name = (Fa3Fp8Attention(), CudnnFp8Attention(), SageAttention())
        return (FA3, FA4, *TORCH_ATTENTION, ChunkedAttention(), *by_name)

    def linear_kernels(self) -> Mapping[str, Sequence[LinearKernel]]:
        return linear_kernels()

    def expert_kernels(self) -> Mapping[str, Sequence[ExpertKernel]]:
        return expert_kernels()

    def fused_ops(self) -> Mapping[str, Sequence[FusedOp]]:
        return {op.op: [op] for op in (*FUSED_OPS, *EXPERT_OPS)}


def _toolkit() -> tuple[int, int]:
    """The CUDA version that torch was built with: "12.9" -> (12, 9)."""
    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    return int(major), int(minor)
