"""A backend that keeps none of its promises, each fault of a kind that was seen somewhere.

Installed as a plugin. `WHOLE` faults make one category fail each; the suite must find every one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from portable_dit import ops
from portable_dit.backend import API_VERSION, AttentionKernel, FusedOp, Lane, LinearKernel, Packed
from portable_dit.capabilities import Capabilities, CollectiveLimits, Device, GraphLimits
from portable_dit.cpu import CpuBackend
from portable_dit.masks import Mask

PLUGIN = """
from broken_device import BrokenBackend
from portable_dit.hooks import hookimpl

@hookimpl
def portable_dit_backends():
    return [BrokenBackend()]
"""


class HalfScale(AttentionKernel):
    """Forgets a factor, and puts its random numbers into the picture."""

    id = "half_scale"

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
        out = super().run(q, k, v, mask, scale=scale / 2)
        return out + torch.randn(1).to(out.dtype)


class FirstScale(LinearKernel):
    """Takes the first row's scale for all rows."""

    quantizes_input = True

    def apply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        weight = packed["values"].float() * packed["scales"][:1]
        return torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float()).to(
            x.dtype
        )


def other_half(x: Tensor) -> Tensor:
    """Gates with the second half."""
    value, gate = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * value


class HalfLane(Lane):
    """Copies the first half."""

    def copy(self, destination: Tensor, source: Tensor) -> None:
        half = destination.numel() // 2
        destination.view(-1)[:half].copy_(source.reshape(-1)[:half])


class BrokenBackend(CpuBackend):
    id = "broken"
    api_version = API_VERSION

    def __init__(self) -> None:
        self.asked = 0

    def devices(self) -> list[Device]:
        self.asked += 1
        name = f"answer {self.asked % 2}"  # not the same twice
        return [replace(super().devices()[0], backend=self.id, name=name)]

    def capabilities(self, device: Device) -> Capabilities:
        return replace(
            super().capabilities(device),
            host_shares_memory=False,
            native_formats=frozenset({"int8_row"}),
            graphs=GraphLimits(supported=True),
            collectives=CollectiveLimits("elsewhere"),  # and process_group says gloo
        )

    def lane(self, device: Device) -> Lane:
        return HalfLane()

    def host_buffer(self, nbytes: int) -> Tensor:
        torch.rand(1)  # spends the caller's random numbers
        return super().host_buffer(nbytes)

    def graph(
        self, function: Callable[..., Tensor], example_inputs: Sequence[Tensor]
    ) -> Callable[..., Tensor]:
        output = function(*example_inputs)
        return lambda *inputs: output  # the inputs of the capture for ever

    def attention_kernels(self) -> Sequence[AttentionKernel]:
        return [HalfScale()]

    def linear_kernels(self) -> Mapping[str, Sequence[LinearKernel]]:
        return {"int8_row": [FirstScale("int8_row", "first_scale")]}

    def fused_ops(self) -> Mapping[str, Sequence[FusedOp]]:
        def no_weight(x: Tensor, weight: Tensor | None, eps: float) -> Any:
            return ops.rms_norm(x, None, eps)

        def first_choice(x: Tensor, places: Tensor, shares: Tensor) -> Tensor:
            return ops.combine_experts(x, places[:, :1], shares[:, :1])

        return {
            "combine_experts": [FusedOp("combine_experts", "first_choice", first_choice)],
            "swiglu": [FusedOp("swiglu", "other_half", other_half)],
            "rms_norm": [FusedOp("rms_norm", "no_weight", no_weight)],
        }
