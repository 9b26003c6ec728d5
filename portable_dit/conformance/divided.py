"""Kernels that quantise a part of an input that is divided over devices round it as all of it would be.

The other parts are pretended: they say that their largest magnitudes are LARGER times as large as those here.

Letters: M rows, N out features, K in features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from portable_dit.backend import EmulatedLinear, ExpertKernel, LinearKernel
from portable_dit.capabilities import Capabilities, Device, ExpertRequest, LinearRequest
from portable_dit.conformance import experts, linear
from portable_dit.conformance.outcome import Outcome, Promises
from portable_dit.formats import WHOLE, Agree, encode
from portable_dit.ops import Dispatch

LARGER = 3.0  # no power of two, by which e4m3 values would not change
CASE = "divided"
Run = Callable[[Agree | None], Tensor]  # with the others, or as if all of the input were here


def check_divided(
    kernel: LinearKernel | ExpertKernel, device: Device, capabilities: Capabilities, dtype: str
) -> list[Outcome]:
    """One outcome for a kernel that quantises its input with scales that span parts, none for others."""
    form = kernel.format
    if not kernel.quantizes_input or WHOLE not in (form.activations or ()):
        return []
    request: LinearRequest | ExpertRequest
    if isinstance(kernel, ExpertKernel):
        op, mixture = f"experts:{form.name}", experts.CASES[0]
        rows, shape = sum(mixture.counts), (mixture.in_features, mixture.out_features)
        request = ExpertRequest(form.name, dtype, rows, len(mixture.counts), *shape, divided=True)
    else:
        op, layer = f"linear:{form.name}", linear.CASES[0]
        shape = layer.in_features, layer.out_features
        request = LinearRequest(form.name, dtype, layer.rows, *shape, divided=True)
    told = Promises(op, kernel.id)
    reject = kernel.check(request, capabilities)
    if reject is not None:
        told.not_claimed(CASE, reject.detail)
        return told.outcomes
    runs = _experts if isinstance(kernel, ExpertKernel) else _linear
    told.check(CASE, lambda: _trouble(*runs(kernel, device, dtype)), dtype=dtype)  # type: ignore[arg-type]
    return told.outcomes


def _trouble(ours: Run, emulated: Run) -> str | None:
    asked = 0

    def agree(largest: Tensor) -> Tensor:
        nonlocal asked
        asked += 1
        return largest * LARGER

    got = ours(agree).float().cpu()
    if asked != 1:
        return f"asks the other devices {asked} times for one input"
    together, alone = emulated(lambda largest: largest * LARGER), emulated(None)
    off, apart = (float((got - other).abs().mean()) for other in (together, alone))
    return None if off < apart / 2 else "its scales are not those that the devices agreed on"


def _linear(kernel: LinearKernel, device: Device, dtype: str) -> tuple[Run, Run]:
    x, weight, _ = linear.inputs(linear.CASES[0])
    x = x.to(getattr(torch, dtype))

    def run(one: LinearKernel, x: Tensor, where: str) -> Run:
        packed = one.pack(encode(weight.to(where), one.format.name), x.dtype)
        x = x.to(where)
        return lambda agree: (
            one.apply(x, packed, None) if agree is None else one.apply_divided(x, packed, None, agree)
        )

    plain = EmulatedLinear(kernel.format.name)
    return run(kernel, x, device.torch_device), run(plain, x.float(), "cpu")


def _experts(kernel: ExpertKernel, device: Device, dtype: str) -> tuple[Run, Run]:
    x, weight, dispatch = experts.inputs(experts.CASES[0])
    x, columns = x.to(getattr(torch, dtype)), weight.shape[1]

    def run(one: ExpertKernel, x: Tensor, where: str) -> Run:
        each = [one.pack(encode(own.to(where), one.format.name), x.dtype) for own in weight]
        packed = {name: torch.stack([part[name] for part in each]) for name in each[0]}
        x, there = x.to(where), Dispatch(None, dispatch.ends.to(where))
        return lambda agree: (
            one.apply(x, packed, there, columns)
            if agree is None
            else one.apply_divided(x, packed, there, columns, agree)
        )

    plain = ExpertKernel(EmulatedLinear(kernel.format.name))
    return run(kernel, x, device.torch_device), run(plain, x.float(), "cpu")
