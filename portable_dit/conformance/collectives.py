"""Collectives: the exchanges that parallel layouts are made of, between processes, through the device's own.

Each rank is a process of its own. With one device there is one rank, which shows only that groups can be made
and that calls take what they are given; on the host, where two processes may share the processor, there are
two.

    python -m portable_dit.conformance.collectives BACKEND RANK WORLD FILE     is one rank
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from portable_dit.backend import Backend
from portable_dit.capabilities import Capabilities, Device
from portable_dit.conformance.outcome import Outcome, Promises
from portable_dit.plugins import attempt, select_backend

TIMEOUT = 120  # seconds, for the first exchange to set up its connections
CASES = (
    "group_is_made",
    "all_reduce",
    "all_gather",
    "all_gather_bytes",
    "reduce_scatter",
    "broadcast",
    "all_to_all_uneven",
    "ring",
    "subgroup",
    "two_groups_in_order",
    "in_a_graph",
)
Said = dict[str, str | None]


def check_collectives(backend: Backend, device: Device, capabilities: Capabilities) -> list[Outcome]:
    """One outcome for each exchange; the ranks are processes of their own, since a group cannot be undone."""
    told = Promises("collectives", backend.id)
    limits, here = capabilities.collectives, device.torch_device == "cpu"
    world = 2 if here or capabilities.count > 1 else 1
    unclaimed = {
        "all_to_all_uneven": None if limits.all_to_all else "all_to_all is false",
        "ring": None if limits.point_to_point else "point_to_point is false",
        "in_a_graph": None if capabilities.graphs.collectives else "graphs.collectives is false",
    }
    said = _run_ranks(backend.id, world)
    for case in CASES:
        why = unclaimed.get(case)
        if why is not None:
            told.not_claimed(case, why)
        else:
            told.check(f"{case}_{world}", lambda case=case: _worst(said, case))  # type: ignore[misc]
    return told.outcomes


def _worst(said: list[Said], case: str) -> str | None:
    for rank, answers in enumerate(said):
        problem = answers.get(case, answers.get("died", "was not reached"))
        if problem:
            return f"rank {rank}: {problem}"
    return None


def _run_ranks(backend: str, world: int) -> list[Said]:
    """What each rank says: case -> problem, or {"died": why}."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, backend, str(rank), str(world), f"{folder}/store"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        said: list[Said] = []
        for process in ranks:
            try:
                output, errors = process.communicate(timeout=2 * TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                said.append({"died": f"gave no answer in {2 * TIMEOUT} s"})
                continue
            last = errors.strip().splitlines()[-1] if errors.strip() else ""
            lines = [line for line in output.splitlines() if line.startswith("{")]
            said.append(json.loads(lines[-1]) if lines else {"died": f"died: {last or process.returncode}"})
    return said


class _Rank:
    """One rank of the group, with tensors of small whole numbers, whose sums are exact in every dtype."""

    def __init__(self, backend: Backend, rank: int, world: int) -> None:
        self.backend = backend
        self.device = backend.devices()[rank % len(backend.devices())]
        self.rank = rank
        self.world = world

    def numbers(self, *shape: int, dtype: torch.dtype = torch.float32, rank: int | None = None) -> Tensor:
        """Numbers that differ between ranks and places."""
        count = torch.Size(shape).numel()
        rank = self.rank if rank is None else rank
        values = (torch.arange(count) % 11 + 13 * rank).view(shape)
        return values.to(dtype).to(self.device.torch_device)

    def group_is_made(self, store: str) -> str | None:
        capabilities = self.backend.capabilities(self.device)
        arguments = self.backend.process_group(self.device)
        named = str(arguments.get("backend"))
        if capabilities.collectives.backend not in named:
            return f"capabilities say {capabilities.collectives.backend}, process_group says {named}"
        if ("device_id" in arguments) and not capabilities.collectives.passes_device_id:
            return "passes_device_id is false, and process_group passes it"
        dist.init_process_group(
            init_method=f"file://{store}",
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=TIMEOUT),
            **arguments,
        )
        return None

    def all_reduce(self) -> str | None:
        for dtype in self._dtypes():
            got = self.numbers(8, 24, dtype=dtype)
            dist.all_reduce(got)
            wanted = sum(self.numbers(8, 24, rank=r) for r in range(self.world))
            if not _same(got.float(), wanted):
                return f"wrong sums in {dtype}"
        return None

    def all_gather(self) -> str | None:
        for dtype in self._dtypes():
            parts = [torch.empty_like(self.numbers(5, 7, dtype=dtype)) for _ in range(self.world)]
            dist.all_gather(parts, self.numbers(5, 7, dtype=dtype))
            if any(not _same(p, self.numbers(5, 7, dtype=dtype, rank=r)) for r, p in enumerate(parts)):
                return f"wrong parts in {dtype}"
        return None

    def all_gather_bytes(self) -> str | None:
        """How 8-bit floats travel, which some libraries do not know."""
        parts = [
            torch.empty(40, dtype=torch.uint8, device=self.device.torch_device) for _ in range(self.world)
        ]
        dist.all_gather(parts, self.numbers(40, dtype=torch.uint8))
        wrong = any(not _same(p, self.numbers(40, dtype=torch.uint8, rank=r)) for r, p in enumerate(parts))
        return "wrong bytes" if wrong else None

    def reduce_scatter(self) -> str | None:
        out = torch.empty(4, 6, device=self.device.torch_device)
        dist.reduce_scatter(out, list(self.numbers(self.world * 4, 6).chunk(self.world)))
        total = sum(self.numbers(self.world * 4, 6, rank=r) for r in range(self.world))
        assert isinstance(total, Tensor)
        return None if _same(out, total.chunk(self.world)[self.rank]) else "wrong sums"

    def broadcast(self) -> str | None:
        got = self.numbers(9)
        dist.broadcast(got, src=self.world - 1)
        return None if _same(got, self.numbers(9, rank=self.world - 1)) else "not what the last rank sent"

    def all_to_all_uneven(self) -> str | None:
        """Rank r sends r + 1 + p rows to rank p."""
        sends = [self.rank + 1 + to for to in range(self.world)]
        takes = [of + 1 + self.rank for of in range(self.world)]
        out = torch.empty(sum(takes), 3, device=self.device.torch_device)
        dist.all_to_all_single(out, self.numbers(sum(sends), 3), takes, sends)
        wanted = []
        for of in range(self.world):
            rows = [of + 1 + to for to in range(self.world)]
            wanted.append(torch.split(self.numbers(sum(rows), 3, rank=of), rows)[self.rank])
        return None if _same(out, torch.cat(wanted)) else "rows went to the wrong place"

    def ring(self) -> str | None:
        """Each rank sends to the next one and hears from the one before, both at once."""
        if self.world == 1:
            return None
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        got = torch.empty(6, device=self.device.torch_device)
        swaps = [dist.P2POp(dist.isend, self.numbers(6), after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(swaps):
            work.wait()
        return None if _same(got, self.numbers(6, rank=before)) else "not what the rank before sent"

    def subgroup(self) -> str | None:
        alone = [dist.new_group([rank]) for rank in range(self.world)]
        got = self.numbers(4)
        dist.all_reduce(got, group=alone[self.rank])
        return None if _same(got, self.numbers(4)) else "a group of one changed its number"

    def two_groups_in_order(self) -> str | None:
        both = [dist.new_group(list(range(self.world))) for _ in range(2)]
        got = self.numbers(50)
        for step in range(6):
            dist.all_reduce(got, group=both[step % 2])
            got /= self.world
        mean = sum(self.numbers(50, rank=r) for r in range(self.world)) / self.world
        assert isinstance(mean, Tensor)
        return None if _same(got, mean) else "exchanges of two groups mixed up"

    def in_a_graph(self) -> str | None:
        def exchange(x: Tensor) -> Tensor:
            summed = x * 2
            dist.all_reduce(summed)
            return summed + 1

        call = self.backend.graph(exchange, [self.numbers(16)])
        if call is None:
            return "graphs.collectives is true, and the capture was refused"
        total = sum(self.numbers(16, rank=r) for r in range(self.world))
        assert isinstance(total, Tensor)
        return (
            None if _same(call(self.numbers(16)), total * 2 + 1) else "a replayed exchange gives other sums"
        )

    def _dtypes(self) -> tuple[torch.dtype, ...]:
        has_bfloat16 = "bfloat16" in self.backend.capabilities(self.device).dtypes
        return (torch.float32, torch.bfloat16) if has_bfloat16 else (torch.float32,)


def _same(got: Tensor, wanted: Tensor | int) -> bool:
    assert isinstance(wanted, Tensor)
    return torch.equal(got.cpu(), wanted.cpu())


def run_rank(name: str, rank: int, world: int, store: str) -> Said:
    """Every exchange on this rank: case -> problem. The first that raises ends it: ranks are out of step."""
    backend = select_backend(name)
    me = _Rank(backend, rank, world)
    backend.activate(me.device)
    capabilities = backend.capabilities(me.device)
    cases: dict[str, Callable[[], str | None]] = {"group_is_made": lambda: me.group_is_made(store)}
    cases |= {case: getattr(me, case) for case in CASES[1:]}
    if not capabilities.collectives.all_to_all:
        del cases["all_to_all_uneven"]
    if not capabilities.collectives.point_to_point:
        del cases["ring"]
    if not capabilities.graphs.collectives:
        del cases["in_a_graph"]
    said: Said = {}
    for case, function in cases.items():
        problem, raised = attempt(function)
        said[case] = f"raised {raised}" if raised is not None else problem
        if raised is not None:
            said["died"] = f"not reached, since {case} raised"
            break
    if dist.is_initialized():
        dist.destroy_process_group()
    return said


if __name__ == "__main__":
    name, rank, world, store = sys.argv[1:]
    print(json.dumps(run_rank(name, int(rank), int(world), str(Path(store)))))
