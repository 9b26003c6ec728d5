"""Transfer: copies between host and device arrive whole, in the order that lanes and marks say."""

from __future__ import annotations

import random

import psutil
import torch
from torch import Tensor, nn

from portable_dit.backend import Backend
from portable_dit.capabilities import Capabilities, Device
from portable_dit.conformance.outcome import Outcome, Promises
from portable_dit.offload import offload

LOADS = 300  # of random blocks into two slots
SLOT = 1 << 18  # bytes
BUFFERS, BUFFER = 5, (32 << 20) + 4096  # just above a power of two, which some allocators round up to


def check_transfer(backend: Backend, device: Device, capabilities: Capabilities) -> list[Outcome]:
    """Buffers, lanes, marks, and offload over them."""
    told = Promises("transfer", backend.id)
    told.check("there_and_back", lambda: _round_trip_trouble(backend, device))
    told.check("from_any_memory", lambda: _pageable_trouble(backend, device))
    told.check("loads_in_order", lambda: _order_trouble(backend, device))
    told.check("slot_is_not_overwritten_early", lambda: _overwrite_trouble(backend, device))
    told.check("layerwise_offload", lambda: _offload_trouble(backend, device))
    told.check("buffers_cost_what_they_hold", lambda: _cost_trouble(backend))
    if capabilities.pinned_memory:
        told.check("buffers_are_pinned", lambda: _pinned_trouble(backend))
    else:
        told.not_claimed("buffers_are_pinned", "pinned_memory is false")
    return told.outcomes


def _filled(backend: Backend, nbytes: int, seed: int) -> Tensor:
    """A host buffer of random bytes."""
    buffer = backend.host_buffer(nbytes)
    random_bytes = torch.randint(0, 256, (nbytes,), generator=torch.Generator().manual_seed(seed))
    return buffer.copy_(random_bytes)


def _slot(device: Device, nbytes: int = SLOT) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device)


def _round_trip_trouble(backend: Backend, device: Device) -> str | None:
    lane = backend.lane(device)
    for nbytes in (1, 4095, SLOT + 1):
        source = _filled(backend, nbytes, nbytes)
        if source.dtype != torch.uint8 or source.shape != (nbytes,) or source.device.type != "cpu":
            return f"host_buffer({nbytes}) is {source.dtype} {list(source.shape)} on {source.device}"
        there, back = _slot(device, nbytes), backend.host_buffer(nbytes)
        lane.copy(there, source)
        lane.copy(back, there)
        backend.synchronize(device)
        if not torch.equal(back, source):
            return f"{nbytes} bytes came back changed"
    return None


def _pageable_trouble(backend: Backend, device: Device) -> str | None:
    """From memory that is not a host buffer: right as well, only perhaps slower."""
    lane, there = backend.lane(device), _slot(device)
    for seed in range(4):
        source = torch.randint(0, 256, (SLOT,), generator=torch.Generator().manual_seed(seed)).byte()
        lane.copy(there, source)
        backend.compute_lane(device).wait(lane.mark())
        if not torch.equal(there.cpu(), source):
            return f"copy number {seed} from pageable memory is wrong"
    return None


def _order_trouble(backend: Backend, device: Device) -> str | None:
    """Random blocks into two slots on a copy lane, each read on the compute lane when its mark is there."""
    compute, copies = backend.compute_lane(device), backend.lane(device)
    blocks = [_filled(backend, SLOT, seed) for seed in range(5)]
    slots = [_slot(device) for _ in range(2)]
    order = random.Random(0).choices(range(len(blocks)), k=LOADS)
    sums = []
    for number, block in enumerate(order):
        slot = slots[number % 2]
        copies.wait(compute.mark())
        copies.copy(slot, blocks[block])
        compute.wait(copies.mark())
        sums.append(compute.run(lambda slot=slot: slot.to(torch.int32).sum()))  # type: ignore[misc]
    backend.synchronize(device)
    wanted = [int(block.to(torch.int32).sum()) for block in blocks]
    wrong = [n for n, (got, block) in enumerate(zip(sums, order, strict=True)) if int(got) != wanted[block]]
    return f"{len(wrong)} of {LOADS} loads were read before they were whole" if wrong else None


def _overwrite_trouble(backend: Backend, device: Device) -> str | None:
    """Work that reads a slot is done before a copy lane that waited for it writes there."""
    compute, copies, slot = backend.compute_lane(device), backend.lane(device), _slot(device)
    first, second = _filled(backend, SLOT, 1), _filled(backend, SLOT, 2)
    for _ in range(20):
        copies.copy(slot, first)
        compute.wait(copies.mark())

        def read() -> Tensor:
            total = slot.to(torch.int32)
            for _ in range(8):
                total = total + slot
            return total

        seen = compute.run(read)
        copies.wait(compute.mark())
        copies.copy(slot, second)
        backend.synchronize(device)
        if not torch.equal(seen.cpu(), first.to(torch.int32) * 9):
            return "a slot was overwritten while it was read"
    return None


def _offload_trouble(backend: Backend, device: Device) -> str | None:
    """The engine's own layerwise offload over this backend's lanes; the second pass skips a block."""
    torch.manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        blocks = nn.ModuleList(nn.Linear(96, 96) for _ in range(6)).to(device.torch_device)
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(0)).to(device.torch_device)
    passes = (range(6), (0, 1, 3, 4, 5), range(6))

    def run(order: tuple[int, ...] | range) -> Tensor:
        out = x
        for index in order:
            out = torch.tanh(blocks[index](out))
        return out.cpu()

    with torch.inference_mode():
        wanted = [run(order) for order in passes]
        layers = offload(list(blocks), 2, backend, device)
        got = [run(order) for order in passes]
        layers.remove()
    same = all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    return None if same else "streamed blocks give other numbers than resident ones"


def _cost_trouble(backend: Backend) -> str | None:
    """Memory of the process for buffers just above a power of two, all of them written to."""
    process = psutil.Process()
    before = process.memory_info().rss
    buffers = [backend.host_buffer(BUFFER).fill_(1) for _ in range(BUFFERS)]
    cost = process.memory_info().rss - before
    held = sum(buffer.nbytes for buffer in buffers)
    return None if cost < 1.5 * held else f"{held} bytes of buffers cost {cost}"


def _pinned_trouble(backend: Backend) -> str | None:
    return (
        None
        if backend.host_buffer(4096).is_pinned()
        else "pinned_memory is true, and host_buffer is not pinned"
    )
