"""The backend: devices, memory, lanes, graphs, and the lists of kernels, best first."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from portable_dit import host
from portable_dit.backend import AttentionKernel, Backend, ExpertKernel, FusedOp, Lane, LinearKernel
from portable_dit.capabilities import Capabilities, CollectiveLimits, Device, GraphLimits
from portable_dit.errors import BackendError
from portable_dit_cuda import chips, device
from portable_dit_cuda.attention import OpenAttention, SdpaAttention
from portable_dit_cuda.experts import EXPERT_OPS, expert_kernels
from portable_dit_cuda.flash import FA3, FA4, Fa3Fp8Attention, SageAttention
from portable_dit_cuda.fusions import FUSED_OPS
from portable_dit_cuda.graphs import GraphPool
from portable_dit_cuda.host_memory import locked_buffer
from portable_dit_cuda.lanes import CudaLane
from portable_dit_cuda.linear import linear_kernels
from portable_dit_cuda.probe import probe_libraries

MASKS_OF_FLASH = frozenset({"none", "causal", "causal_with_full_spans", "segments"})
ALL_DTYPES = frozenset({"bfloat16", "float16", "float32"})


class CudaBackend(Backend):
    """NVIDIA devices through torch.cuda."""

    id = "cuda"
    api_version = 1

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
            head_dims=chips.HEAD_DIMS,
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

    def activate(self, device: Device) -> None:
        torch.cuda.set_device(device.index)

    def memory(self, device: Device) -> tuple[int, int] | None:
        """Free counts what torch holds without using it."""
        free, total = torch.cuda.mem_get_info(device.index)
        idle = torch.cuda.memory_reserved(device.index) - torch.cuda.memory_allocated(device.index)
        return free + idle, total

    def peak_bytes(self, device: Device, *, reset: bool = False) -> int | None:
        peak = torch.cuda.max_memory_reserved(device.index)
        if reset:
            torch.cuda.reset_peak_memory_stats(device.index)
        return peak

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

    def synchronize(self, device: Device) -> None:
        torch.cuda.synchronize(device.index)

    def trim(self, device: Device) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def compute_lane(self, device: Device) -> Lane:
        return CudaLane(torch.device(device.torch_device))

    def lane(self, device: Device) -> Lane:
        where = torch.device(device.torch_device)
        return CudaLane(where, torch.cuda.Stream(where))

    def host_buffer(self, nbytes: int) -> Tensor:
        return locked_buffer(nbytes)

    def graph(
        self, function: Callable[..., Tensor], example_inputs: Sequence[Tensor]
    ) -> Callable[..., Tensor] | None:
        return _graph_pool(example_inputs[0].device).capture(function, example_inputs)

    def process_group(self, device: Device) -> dict[str, Any]:
        return {"backend": "nccl", "device_id": torch.device(device.torch_device)}

    def cluster_resources(self) -> Mapping[str, float]:
        return {"GPU": 1.0}

    def attention_kernels(self) -> Sequence[AttentionKernel]:
        return (
            FA3,
            FA4,
            SdpaAttention("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION),
            SdpaAttention("sdpa_flash", SDPBackend.FLASH_ATTENTION, masks=MASKS_OF_FLASH),
            SdpaAttention("sdpa_efficient", SDPBackend.EFFICIENT_ATTENTION, dtypes=ALL_DTYPES),
            OpenAttention(),
            Fa3Fp8Attention(),
            SageAttention(),
        )

    def linear_kernels(self) -> Mapping[str, Sequence[LinearKernel]]:
        return linear_kernels()

    def expert_kernels(self) -> Mapping[str, Sequence[ExpertKernel]]:
        return expert_kernels()

    def fused_ops(self) -> Mapping[str, Sequence[FusedOp]]:
        return {op.op: [op] for op in (*FUSED_OPS, *EXPERT_OPS)}


@cache
def _graph_pool(device: torch.device) -> GraphPool:
    return GraphPool(device)


def _toolkit() -> tuple[int, int]:
    """The CUDA version that torch was built with: "12.9" -> (12, 9)."""
    major, minor = (torch.version.cuda or "0.0").split(".")[:2]
    return int(major), int(minor)
