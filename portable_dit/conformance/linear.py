"""Cases of quantised linear layers and their oracle: the stored weight, decoded, times the input, in float64.

Letters: M rows, N out features, K in features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from portable_dit.backend import Backend, EmulatedLinear, LinearKernel
from portable_dit.capabilities import Capabilities, Device, LinearRequest
from portable_dit.conformance.outcome import REPEATS, Outcome, Promises, judge
from portable_dit.formats import Encoded, decode, encode
from portable_dit.plugins import attempt


@dataclass(frozen=True)
class LinearCase:
    """One layer. outlier: an input row and a weight row 300 times larger. zeros: an all-zero row in both."""

    name: str
    rows: int = 96
    in_features: int = 384
    out_features: int = 256
    bias: bool = True
    outlier: bool = False
    zeros: bool = False


CASES: tuple[LinearCase, ...] = (
    LinearCase("plain"),
    LinearCase("no_bias", bias=False),
    LinearCase("one_row", rows=1),
    LinearCase("odd_rows", rows=17),
    LinearCase("many_rows", rows=544, in_features=384, out_features=1024),
    LinearCase("unaligned", rows=33, in_features=200, out_features=72),
    LinearCase("odd_features", rows=33, in_features=131, out_features=65),
    LinearCase("outlier", outlier=True),
    LinearCase("zeros", zeros=True),
)


def check_linear(
    kernel: LinearKernel,
    backend: Backend,
    device: Device,
    capabilities: Capabilities,
    dtype: str,
    cases: Sequence[LinearCase] = CASES,
    repeats: int = REPEATS,
) -> list[Outcome]:
    """One outcome per case. repeats: runs, the best of which is the time."""
    return [_check(kernel, backend, device, capabilities, dtype, case, repeats) for case in cases]


def check_encoding(format: str, backend: Backend, device: Device) -> list[Outcome]:
    """A weight encoded on the device is the one that the host makes, bit for bit."""
    told = Promises(f"linear:{format}", "encode")
    for case in CASES:
        if case.outlier or case.zeros or case.name in ("plain", "odd_features"):
            told.check(case.name, lambda case=case: _encoding_trouble(format, device, case))  # type: ignore[misc]
    return told.outcomes


def _encoding_trouble(format: str, device: Device, case: LinearCase) -> str | None:
    here, there = _stored(case, format), encode(inputs(case)[1].to(device.torch_device), format)
    for what, a, b in (("values", here.values, there.values), ("scales", here.scales, there.scales)):
        if a is None or b is None:
            continue
        same = a.view(torch.uint8) == b.cpu().view(torch.uint8)
        if not bool(same.all()):
            return f"{int((~same).sum())} of {same.numel()} bytes of the {what} differ"
    return None


def _check(
    kernel: LinearKernel,
    backend: Backend,
    device: Device,
    capabilities: Capabilities,
    dtype: str,
    case: LinearCase,
    repeats: int,
) -> Outcome:
    name, op = kernel.format.name, f"linear:{kernel.format.name}"
    request = LinearRequest(name, dtype, case.rows, case.in_features, case.out_features)
    reject = kernel.check(request, capabilities)
    if reject is not None:
        return Outcome(op, kernel.id, case.name, dtype, "not_claimed", reject.detail)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    x, weight, bias = inputs(case)
    x, bias = x.to(torch_dtype), None if bias is None else bias.to(torch_dtype)
    encoded = _stored(case, name)
    wanted = x.double() @ decode(encoded).double().T + (0.0 if bias is None else bias.double())
    on_device = encode(weight.to(device.torch_device), name)
    x_there, bias_there = x.to(device.torch_device), None if bias is None else bias.to(device.torch_device)
    plain = EmulatedLinear(name) if kernel.quantizes_input else LinearKernel(name)
    packed, raised = attempt(lambda: kernel.pack(on_device, torch_dtype))
    if packed is None:
        return Outcome(op, kernel.id, case.name, dtype, "fail", f"pack raised {raised}")
    plain_there = plain.pack(on_device, torch_dtype)
    return judge(
        lambda: kernel.apply(x_there, packed, bias_there),
        lambda: plain.apply(x_there, plain_there, bias_there),
        wanted,
        plain_on_host=lambda: plain.apply(x, plain.pack(encoded, torch_dtype), bias),
        op=op,
        kernel=kernel.id,
        case=case.name,
        dtype=dtype,
        backend=backend,
        device=device,
        repeats=repeats,
    )


@lru_cache(maxsize=2 * len(CASES))
def _stored(case: LinearCase, format: str) -> Encoded:
    """The weight as it is stored."""
    return encode(inputs(case)[1], format)


def inputs(case: LinearCase) -> tuple[Tensor, Tensor, Tensor | None]:
    """x [M, K], weight [N, K] and bias [N], float32 on the host, the same on every machine."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(case.rows, case.in_features, generator=generator)
    weight = torch.randn(case.out_features, case.in_features, generator=generator) * case.in_features**-0.5
    # Rows of unlike size, or a kernel that takes the wrong row's scale would pass.
    x *= torch.rand(case.rows, 1, generator=generator) * 4 + 0.1
    weight *= torch.rand(case.out_features, 1, generator=generator) * 4 + 0.1
    bias = torch.randn(case.out_features, generator=generator) if case.bias else None
    if case.outlier:
        x[3] *= 300
        weight[5] *= 300
    if case.zeros:
        x[3], weight[5] = 0, 0
    return x, weight, bias
