"""Cases of a mixture's experts: who is chosen, their layers, plain and quantised, and the sum they give.

The oracle is each expert's weight, decoded, times the rows that are its own, in float64. How rows fall to
experts is part of a case: evenly, all to one, or none to some.

Letters: M rows, R rows ordered by expert, E experts, N out features, K in features, k choices of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from portable_dit import ops
from portable_dit.backend import Backend, EmulatedLinear, ExpertKernel, FusedOp, LinearKernel
from portable_dit.capabilities import Capabilities, Device, ExpertRequest, FusionRequest
from portable_dit.conformance.outcome import REPEATS, Outcome, judge
from portable_dit.formats import Encoded, decode, encode
from portable_dit.ops import Dispatch
from portable_dit.plugins import attempt

ROUTED = 16  # experts that a row is routed among


@dataclass(frozen=True)
class ExpertCase:
    """counts: rows of each expert. picked: rows are taken from a smaller input, some of them often."""

    name: str
    counts: tuple[int, ...]
    in_features: int = 384
    out_features: int = 256
    picked: bool = False


CASES: tuple[ExpertCase, ...] = (
    ExpertCase("even", (32, 32, 32, 32)),
    ExpertCase("uneven", (1, 77, 0, 13, 5)),
    ExpertCase("all_to_one", (0, 0, 96)),
    ExpertCase("picked", (17, 30, 2, 40), picked=True),
    ExpertCase("wide", (64, 9, 120, 200), 256, 1024, picked=True),
)


def check_experts(
    kernel: ExpertKernel,
    backend: Backend,
    device: Device,
    capabilities: Capabilities,
    dtype: str,
    cases: Sequence[ExpertCase] = CASES,
    repeats: int = REPEATS,
) -> list[Outcome]:
    """One outcome per case."""
    return [_quantized(kernel, backend, device, capabilities, dtype, case, repeats) for case in cases]


def check_expert_seams(
    op: FusedOp,
    backend: Backend,
    device: Device,
    capabilities: Capabilities,
    dtype: str,
    repeats: int = REPEATS,
) -> list[Outcome]:
    """One outcome per case of `route`, `expert_linear` or `combine_experts`; none for another seam."""
    seam = SEAMS.get(op.op)
    if seam is None:
        return []
    return [_seam(op, seam, backend, device, capabilities, dtype, case, repeats) for case in CASES]


def _seam(
    op: FusedOp,
    seam: ExpertSeam,
    backend: Backend,
    device: Device,
    capabilities: Capabilities,
    dtype: str,
    case: ExpertCase,
    repeats: int,
) -> Outcome:
    reject = op.check(FusionRequest(op.op, dtype, case.in_features), capabilities)
    if reject is not None:
        return Outcome(op.op, op.id, case.name, dtype, "not_claimed", reject.detail)
    arguments = seam.inputs(case, getattr(torch, dtype))
    here = tuple(_at(argument, device) for argument in arguments)
    return judge(
        lambda: seam.read(op.run(*here)),
        lambda: seam.read(seam.plain(*here)),
        seam.oracle(*arguments),
        plain_on_host=lambda: seam.read(seam.plain(*arguments)),
        op=op.op,
        kernel=op.id,
        case=case.name,
        dtype=dtype,
        backend=backend,
        device=device,
        repeats=repeats,
    )


def inputs(case: ExpertCase) -> tuple[Tensor, Tensor, Dispatch]:
    """Rows [M, K] and weights [E, N, K], float32 on the host, and who gets what."""
    generator = torch.Generator().manual_seed(sum(case.counts))
    total = sum(case.counts)
    rows = max(total // 3, 1) if case.picked else total
    x = torch.randn(rows, case.in_features, generator=generator)
    shape = len(case.counts), case.out_features, case.in_features
    weight = torch.randn(shape, generator=generator) * case.in_features**-0.5
    picks = torch.randint(0, rows, (total,), generator=generator) if case.picked else None
    return x, weight, Dispatch(picks, torch.tensor(case.counts).cumsum(0).int())


def oracle(x: Tensor, weight: Tensor, dispatch: Dispatch) -> Tensor:
    """float64 [R, N]. Who owns a row is found for each row by itself."""
    rows = (x if dispatch.rows is None else x[dispatch.rows]).double()
    owner = torch.searchsorted(dispatch.ends, torch.arange(len(rows)), right=True)
    out = rows.new_zeros(len(rows), weight.shape[1])
    for expert, own in enumerate(weight.double()):
        out[owner == expert] = rows[owner == expert] @ own.T
    return out


@lru_cache(maxsize=2 * len(CASES))
def _stored(case: ExpertCase, format: str) -> tuple[tuple[Encoded, ...], Tensor]:
    """The weight as it is stored, expert by expert, and float32 [E, N, K] that this stands for."""
    encoded = tuple(encode(one, format) for one in inputs(case)[1])
    return encoded, torch.stack([decode(one) for one in encoded])


def _quantized(
    kernel: ExpertKernel,
    backend: Backend,
    device: Device,
    capabilities: Capabilities,
    dtype: str,
    case: ExpertCase,
    repeats: int,
) -> Outcome:
    name = kernel.format.name
    op, shape = f"experts:{name}", (case.in_features, case.out_features)
    request = ExpertRequest(name, dtype, sum(case.counts), len(case.counts), *shape)
    reject = kernel.check(request, capabilities)
    if reject is not None:
        return Outcome(op, kernel.id, case.name, dtype, "not_claimed", reject.detail)
    x, weight, dispatch = inputs(case)
    x = x.to(getattr(torch, dtype))
    encoded, decoded = _stored(case, name)
    encoded_there = tuple(encode(one.to(device.torch_device), name) for one in weight)
    plain = ExpertKernel(EmulatedLinear(name) if kernel.linear.quantizes_input else LinearKernel(name))

    def packed(one: ExpertKernel, experts: Sequence[Encoded]) -> dict[str, Tensor]:
        each = [one.pack(expert, x.dtype) for expert in experts]
        return {key: torch.stack([p[key] for p in each]) for key in each[0]}

    ours, raised = attempt(lambda: packed(kernel, encoded_there))
    if ours is None:
        return Outcome(op, kernel.id, case.name, dtype, "fail", f"pack raised {raised}")
    there, x_there = _at(dispatch, device), x.to(device.torch_device)
    theirs, at_home = packed(plain, encoded_there), packed(plain, encoded)
    return judge(
        lambda: kernel.apply(x_there, ours, there, case.out_features),
        lambda: plain.apply(x_there, theirs, there, case.out_features),
        oracle(x, decoded, dispatch),
        plain_on_host=lambda: plain.apply(x, at_home, dispatch, case.out_features),
        op=op,
        kernel=kernel.id,
        case=case.name,
        dtype=dtype,
        backend=backend,
        device=device,
        repeats=repeats,
    )


def _at(value: Any, device: Device) -> Any:
    """A tensor, or who gets what, on the device; a number as it is."""
    match value:
        case Tensor():
            return value.to(device.torch_device)
        case Dispatch():
            return Dispatch(_at(value.rows, device), _at(value.ends, device))
    return value


@dataclass(frozen=True)
class ExpertSeam:
    """How to check one seam: inputs on the host, the plain body, the formula, and what of a result counts."""

    inputs: Callable[[ExpertCase, torch.dtype], tuple[Any, ...]]
    plain: Callable[..., Any]
    oracle: Callable[..., Tensor]
    read: Callable[[Any], Tensor] = lambda result: result


def _to_route(case: ExpertCase, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(ROUTED, case.in_features, generator=generator).to(dtype) * case.in_features**-0.5
    return inputs(case)[0].to(dtype), weight, 4


def _routed(x: Tensor, weight: Tensor, top_k: int) -> Tensor:
    shares, index = (x.double() @ weight.double().T).softmax(dim=-1).topk(top_k, dim=-1)
    return _of_all((index, shares / shares.sum(dim=-1, keepdim=True)))


def _of_all(chosen: tuple[Tensor, Tensor]) -> Tensor:
    """The shares of all experts, 0 for those that were not chosen, so that their order does not count."""
    index, shares = chosen
    return shares.new_zeros(len(index), ROUTED).scatter(1, index, shares)


def _to_multiply(case: ExpertCase, dtype: torch.dtype) -> tuple[Tensor, Tensor, Dispatch]:
    x, weight, dispatch = inputs(case)
    return x.to(dtype), weight.to(dtype), dispatch


def _to_combine(case: ExpertCase, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The case's rows as what experts gave, three for each row of the result."""
    generator = torch.Generator().manual_seed(1)
    x = inputs(case)[0].to(dtype)
    places = torch.randint(0, len(x), (max(len(x) // 3, 1), 3), generator=generator)
    return x, places, torch.rand(places.shape, generator=generator)


def _combined(x: Tensor, places: Tensor, shares: Tensor) -> Tensor:
    return torch.einsum("rk,rkn->rn", shares.double(), x.double()[places])


def _to_deal(case: ExpertCase, dtype: torch.dtype) -> tuple[Tensor, int, int, int]:
    """Three choices for each row; all experts are here, or with `picked` the second and third."""
    count = len(case.counts)
    generator = torch.Generator().manual_seed(3)
    index = torch.randint(0, count, (sum(case.counts), 3), generator=generator)
    return (index, 1, 2, count) if case.picked else (index, 0, count, count)


def _dealt(index: Tensor, first: int, held: int, num_experts: int) -> Tensor:
    owners = [
        expert - first if first <= expert < first + held else held for expert in index.flatten().tolist()
    ]
    order = sorted(range(len(owners)), key=lambda choice: owners[choice])
    rows = [choice // index.shape[1] for choice in order]
    ends = [sum(owner <= expert for owner in owners) for expert in range(held)]
    places = sorted(range(len(order)), key=lambda place: order[place])
    return torch.tensor([*rows, *ends, *places], dtype=torch.float64)


def _in_a_row(dealt: tuple[Dispatch, Tensor]) -> Tensor:
    dispatch, places = dealt
    assert dispatch.rows is not None
    return torch.cat([dispatch.rows, dispatch.ends, places.flatten()]).float()


SEAMS: Mapping[str, ExpertSeam] = {
    "route": ExpertSeam(_to_route, ops.route, _routed, _of_all),
    "deal": ExpertSeam(_to_deal, ops.deal, _dealt, _in_a_row),
    "expert_linear": ExpertSeam(_to_multiply, ops.expert_linear, oracle),
    "combine_experts": ExpertSeam(_to_combine, ops.combine_experts, _combined),
}
