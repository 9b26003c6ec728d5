"""NCCL with a world of one: what several ranks call, on one device. Called by on_device.py.

A group of one sends to itself, so this says that the calls work and that a graph may capture them. What two
devices gain is docs/benchmarks/layouts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from device_bench import BACKEND, make_blocks
from device_bench import milliseconds as device_milliseconds
from torch import Tensor

from portable_dit.ops import Attention
from portable_dit.parallel.collectives import _all_gather

if TYPE_CHECKING:
    from on_device import Report


@contextmanager
def world_of_one() -> Iterator[None]:
    device = BACKEND.devices()[0]
    group = BACKEND.process_group(device)
    dist.init_process_group(rank=0, world_size=1, store=dist.HashStore(), **group)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _reduced(x: Tensor, **options: Any) -> Tensor:
    out = x.clone()
    dist.all_reduce(out, **options)
    return out


def _sent(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, [x.shape[0]], [x.shape[0]])
    return out


def _gathered(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _all_gather(out, x)
    return out


def _cast_to_all(x: Tensor) -> Tensor:
    out = x.clone()
    dist.broadcast(out, src=0)
    return out


def _collected(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x)]
    dist.gather(x, parts, dst=0)
    return parts[0]


def _passed_on(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    calls = [dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.irecv, out, 0)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return out


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "all_reduce": _reduced,
    "all_reduce, largest": lambda x: _reduced(x, op=dist.ReduceOp.MAX),
    "all_to_all": _sent,
    "all_gather": _gathered,
    "broadcast": _cast_to_all,
    "gather": _collected,
    "send and receive": _passed_on,
}


def _with_exchanges(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention with the four exchanges of Ulysses around it."""

    def around(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        q, k, v = (_sent(t.transpose(0, 1).contiguous()).transpose(0, 1) for t in (q, k, v))
        out = attend(q, k, v, *rest, **options)
        return _sent(out.transpose(0, 1).contiguous()).transpose(0, 1)

    return around


def collectives(report: Report, rows: list[int]) -> None:
    """Every call gives back what it was given; a full-size block with exchanges is captured with them."""
    with world_of_one(), torch.inference_mode():
        given = torch.randn(1000, 5376, device="cuda").bfloat16()
        for name, call in CALLS.items():
            report.check(f"{name}: what was sent arrives", torch.equal(call(given), given))
        for length in rows:
            (block,), hidden, arguments = make_blocks(1, length, format="fp8_row")
            plain = block(hidden, *arguments)
            alone = device_milliseconds(lambda b=block, h=hidden, a=arguments: b(h, *a))
            for module in block.modules():
                if isinstance(module, Attention):
                    module.run = _with_exchanges(module.run)

            def run(x: Tensor, b: Any = block, a: Any = arguments) -> Tensor:
                return b(x, *a)

            report.check(
                f"a block with exchanges, {length} rows: the same bits", torch.equal(run(hidden), plain)
            )
            replay = BACKEND.graph(run, [hidden])
            report.check(f"captured with its exchanges, {length} rows", replay is not None)
            if replay is None:
                continue
            other = torch.randn_like(hidden)
            exact = torch.equal(replay(hidden), plain) and torch.equal(replay(other), run(other))
            report.check(f"replay is eager, {length} rows", exact)
            sent, replayed = (device_milliseconds(lambda f=f, h=hidden: f(h)) for f in (run, replay))
            text = f"{alone:.3f} ms, with exchanges {sent:.3f}, from a graph {replayed:.3f}"
            report.measured(f"a block of {length} rows", text)
            del replay
