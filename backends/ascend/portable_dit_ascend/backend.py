"""The backend: devices and capabilities, graphs, and the lists of kernels, best first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from portable_dit import host
from portable_dit.accelerator import AcceleratorBackend, GraphStyle
from portable_dit.backend import AttentionKernel, FusedOp, LinearKernel
from portable_dit.capabilities import Capabilities, CollectiveLimits, Device, GraphLimits
from portable_dit.errors import BackendError
from portable_dit_ascend import attention, device, linear
from portable_dit_ascend.fusions import FUSED_OPS


class AscendBackend(AcceleratorBackend):
    """Ascend NPUs through torch_npu and CANN."""

    id = "ascend"
    api_version = 1
    device_type = "npu"

    @property
    def module(self) -> Any:
        runtime = device.npu()
        if runtime is None:
            raise BackendError(f"backend ascend: {device.absence()}.")
        return runtime

    def devices(self) -> list[Device]:
        return device.devices()

    def absence(self) -> str | None:
        return device.absence()

    def capabilities(self, device: Device) -> Capabilities:
        return describe(device, count=len(self.devices()))

    def graph_style(self) -> GraphStyle:
        # Streams of the collectives library and the default one are not the capture's: wait for the inputs.
        return GraphStyle("NPUGraph", options={"capture_error_mode": "thread_local"}, fatal=True, waits=True)

    def graph(
        self, function: Callable[..., Tensor], example_inputs: Sequence[Tensor]
    ) -> Callable[..., Tensor] | None:
        def captured(*inputs: Tensor) -> Tensor:
            with attention.capturing():
                return function(*inputs)

        return super().graph(captured, example_inputs)

    def cluster_resources(self) -> Mapping[str, float]:
        return {"NPU": 1.0}

    def attention_kernels(self) -> Sequence[AttentionKernel]:
        return attention.KERNELS

    def linear_kernels(self) -> Mapping[str, Sequence[LinearKernel]]:
        return linear.linear_kernels()

    def fused_ops(self) -> Mapping[str, Sequence[FusedOp]]:
        return {op.op: [op] for op in FUSED_OPS}


def describe(found: Device, *, count: int) -> Capabilities:
    """What a device of a family can do."""
    return Capabilities(
        device=found,
        count=count,
        dtypes=device.dtypes(found.arch),
        native_formats=device.native_formats(found.arch),
        float64=False,
        pinned_memory=True,
        async_copy=True,
        graphs=GraphLimits(supported=found.arch in device.SERVED, failure_is_fatal=True),
        collectives=CollectiveLimits("hccl", passes_device_id=False),
        host_bytes=host.memory()[1],
        runtime_bytes=device.RUNTIME_BYTES,
    )
