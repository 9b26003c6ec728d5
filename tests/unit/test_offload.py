"""Offload on a device whose copies lag behind: nothing is copied until the compute lane waits for it."""

from __future__ import annotations

import random

import pytest
import torch
from apart_device import PLUGIN
from torch import Tensor, nn

from portable_dit.backend import Backend, Lane, Mark
from portable_dit.cpu import CpuBackend
from portable_dit.drawing import memory_explained
from portable_dit.errors import BackendError, DeviceMemoryError
from portable_dit.offload import ALIGNMENT, ComponentOffload, offload, streamed_blocks
from portable_dit.quantize import QuantizedLinear, quantize
from portable_dit.setup import set_up

DEVICE = CpuBackend().devices()[0]


class Moment(Mark):
    def __init__(self, lane: LoggedLane, position: int, time: int) -> None:
        self.lane, self.position, self.time = lane, position, time


class LoggedLane(Lane):
    """Queues copies, runs them only when a lane waits for a later mark, and logs what happens in order."""

    def __init__(self, name: str, log: list[tuple[object, ...]]) -> None:
        self.name, self.log = name, log
        self.queue: list[tuple[Tensor, Tensor]] = []
        self.done = 0

    def copy(self, destination: Tensor, source: Tensor) -> None:
        self.log.append(("copy", destination.data_ptr()))
        self.queue.append((destination, source))

    def mark(self) -> Mark:
        self.log.append(("mark", self.name))
        return Moment(self, len(self.queue), len(self.log))

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, Moment)
        self.log.append(("wait", self.name, mark.lane.name, mark.time))
        while mark.lane.done < mark.position:
            destination, source = mark.lane.queue[mark.lane.done]
            destination.copy_(source)
            mark.lane.done += 1


class LaggingBackend(CpuBackend):
    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.compute = LoggedLane("compute", self.log)
        self.buffers: list[int] = []

    def compute_lane(self, device: object) -> Lane:
        return self.compute

    def lane(self, device: object) -> Lane:
        return LoggedLane("copies", self.log)

    def host_buffer(self, nbytes: int) -> Tensor:
        self.buffers.append(nbytes)
        return torch.full((nbytes,), 0x7F, dtype=torch.uint8)


class Block(nn.Module):
    """A block with every kind of tensor: a transposed buffer, a scalar, integers, odd sizes, a shared one."""

    def __init__(self, size: int = 24, log: list[tuple[object, ...]] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(size, 17)
        self.second = nn.Linear(17, size, bias=False)
        self.norm = nn.LayerNorm(size)
        self.again = nn.LayerNorm(size)
        self.again.weight = self.norm.weight
        self.register_buffer("turned", torch.randn(3, size).t())
        self.register_buffer("scalar", torch.tensor(0.5 + torch.rand(()).item()))
        self.register_buffer("ids", torch.arange(size).flip(0))
        self.log = log if log is not None else []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(
            ("run", self.turned.data_ptr())
        )  # the first tensor laid out, so where its slot begins
        y = self.second(torch.tanh(self.first(x))) * self.scalar
        return self.again(self.norm(x + y) + self.turned.sum(1))[..., self.ids]


def blocks_of(count: int, log: list[tuple[object, ...]] | None = None) -> nn.ModuleList:
    torch.manual_seed(count)
    return nn.ModuleList(Block(log=log) for _ in range(count))


def run(blocks: nn.ModuleList, order: list[int], x: Tensor) -> Tensor:
    with torch.inference_mode():
        for index in order:
            x = blocks[index](x)
    return x


@pytest.mark.parametrize("resident", [0, 1, 2, 5])
def test_streamed_blocks_compute_what_resident_ones_do(resident: int) -> None:
    blocks, x = blocks_of(6), torch.randn(2, 24)
    order = list(range(6)) * 3
    wanted = run(blocks, order, x)
    offload(blocks, resident, LaggingBackend(), DEVICE)
    assert torch.equal(run(blocks, order, x), wanted)


def test_skipped_repeated_and_shuffled_blocks_still_see_their_own_weights() -> None:
    blocks, x = blocks_of(7), torch.randn(2, 24)
    chance = random.Random(0)
    order = [chance.randrange(7) for _ in range(300)] + [0, 0, 0, 3, 3, 6, 0]
    wanted = run(blocks, order, x)
    offload(blocks, 2, LaggingBackend(), DEVICE)
    assert torch.equal(run(blocks, order, x), wanted)


def test_the_order_is_wait_then_copy_then_mark_then_wait_then_run() -> None:
    backend = LaggingBackend()
    blocks = blocks_of(5, log=backend.log)
    offload(blocks, 1, backend, DEVICE)
    run(blocks, [0, 1, 2, 3, 4, 0, 2, 4, 1], torch.randn(2, 24))
    log = backend.log
    copied: dict[int, int] = {}  # slot -> position of the mark after its latest copy
    last_run: dict[int, int] = {}  # slot -> position of its latest use
    awaited = 0
    for position, event in enumerate(log):
        if event[0] == "copy":
            slot = int(str(event[1]))
            before, after = log[position - 1], log[position + 1]
            assert before[:3] == ("wait", "copies", "compute"), "a slot was overwritten without a wait"
            assert int(str(before[3])) > last_run.get(slot, -1), (
                "the wait was for a moment before the last use"
            )
            assert after == ("mark", "copies")
            copied[slot] = position + 2
        elif event[:3] == ("wait", "compute", "copies"):
            awaited = max(awaited, int(str(event[3])))
        elif event[0] == "run" and event[1] in copied:
            slot = int(str(event[1]))
            assert awaited >= copied[slot], "a block ran before its weights were there"
            last_run[slot] = position
    assert len(copied) == len(last_run) == 2
    assert sum(event[0] == "run" for event in log) == 9


def test_the_next_block_is_on_its_way_before_the_present_one_runs() -> None:
    backend = LaggingBackend()
    blocks = blocks_of(4, log=backend.log)
    offload(blocks, 0, backend, DEVICE)
    run(blocks, [0, 1, 2, 3] * 2, torch.randn(1, 24))
    copies = [i for i, event in enumerate(backend.log) if event[0] == "copy"]
    runs = [i for i, event in enumerate(backend.log) if event[0] == "run"]
    assert len(copies) == 9  # one per call, and the first of the next step
    assert all(copies[n + 1] < runs[n] for n in range(8))


def test_weights_are_let_go_after_the_block_even_when_it_raises() -> None:
    blocks = blocks_of(3)
    offload(blocks, 0, LaggingBackend(), DEVICE)
    run(blocks, [0], torch.randn(1, 24))
    assert all(t.is_meta for t in (*blocks[0].parameters(), *blocks[0].buffers()))
    with pytest.raises(RuntimeError):
        blocks[1](torch.randn(1, 5))
    assert all(t.is_meta for t in (*blocks[1].parameters(), *blocks[1].buffers()))


def test_host_memory_is_one_buffer_per_block_without_rounding_up() -> None:
    backend, blocks = LaggingBackend(), blocks_of(4)
    tensors = {id(t): t for t in (*blocks[0].parameters(), *blocks[0].buffers())}
    aligned = sum(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in tensors.values())
    moved = offload(blocks, 1, backend, DEVICE)
    assert backend.buffers == [aligned] * 3
    assert moved.host_bytes == 3 * aligned
    assert moved.slot_bytes == 2 * aligned


def test_quantised_layers_are_streamed_with_their_packed_buffers() -> None:
    backend = LaggingBackend()
    for format, kernel in (("int8_row", "int8_matmul"), ("mxfp8", "emulated"), ("fp8_block128", "plain")):
        blocks, x = blocks_of(4), torch.randn(3, 24)
        for block in blocks:
            weights = {
                name: layer.weight for name, layer in block.named_modules() if isinstance(layer, nn.Linear)
            }
            quantize(block, format=format, keep=[], backend=backend, kernel_id=kernel)
            for name, weight in weights.items():
                block.get_submodule(name).accept_weight(weight)
        wanted = run(blocks, list(range(4)) * 2, x)
        offload(blocks, 1, backend, DEVICE)
        streamed = [layer for layer in blocks[0].modules() if isinstance(layer, QuantizedLinear)]
        assert all(getattr(layer, name).is_meta for layer in streamed for name in layer.packed_names)
        assert torch.equal(run(blocks, list(range(4)) * 2, x), wanted)


def test_weights_made_in_inference_mode_can_be_streamed() -> None:
    with torch.inference_mode():
        blocks = blocks_of(3)
    x = torch.randn(1, 24)
    wanted = run(blocks, [0, 1, 2], x)
    offload(blocks, 0, LaggingBackend(), DEVICE)
    assert torch.equal(run(blocks, [0, 1, 2], x), wanted)


def test_removing_the_offload_gives_every_block_its_weights_back() -> None:
    blocks = blocks_of(4)
    before = {name: tensor.clone() for name, tensor in blocks.state_dict().items()}
    strides = blocks[0].turned.stride()
    moved = offload(blocks, 1, LaggingBackend(), DEVICE)
    run(blocks, [0, 1, 2, 3], torch.randn(1, 24))
    moved.remove()
    after = blocks.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert blocks[0].turned.stride() == strides
    run(blocks, [2, 1], torch.randn(1, 24))


def test_a_component_visits_the_device_and_goes_home() -> None:
    backend, block, x = LaggingBackend(), blocks_of(1)[0], torch.randn(2, 24)
    wanted = block(x)
    parked = ComponentOffload(block, backend, DEVICE)
    home = block.first.weight.data_ptr()
    backend.compute.wait(backend.compute.mark())
    with parked.on_device(), torch.no_grad():
        backend.compute.wait(backend.compute.mark())  # this lane lags as well; a real one keeps its own order
        assert block.first.weight.data_ptr() != home
        assert torch.equal(block(x), wanted)
    assert block.first.weight.data_ptr() == home
    assert torch.equal(block(x), wanted)


def test_resident_blocks_are_spread_evenly() -> None:
    assert streamed_blocks(6, 0) == (0, 1, 2, 3, 4, 5)
    assert streamed_blocks(6, 3) == (0, 2, 4)
    for count in range(1, 40):
        for resident in range(count):
            assert len(streamed_blocks(count, resident)) == count - resident


@pytest.mark.parametrize("resident", [-1, 3, 9])
def test_a_senseless_number_of_resident_blocks_is_refused(resident: int) -> None:
    with pytest.raises(BackendError, match="from 0 to 2"):
        offload(blocks_of(3), resident, CpuBackend(), DEVICE)


def test_blocks_that_share_a_weight_are_refused() -> None:
    blocks = blocks_of(3)
    blocks[2].first = blocks[0].first
    with pytest.raises(BackendError, match="share the tensor 'weight'"):
        offload(blocks, 0, Backend(), DEVICE)


@pytest.mark.parametrize(
    ("offload", "advice"),
    [
        ({"dit": "layerwise", "resident_blocks": 2}, "fewer blocks on the device with --set offload.res"),
        ({}, "move weights to the host with --set offload.text_encoder=component --set offload.dit=layer"),
        ({"dit": "layerwise", "resident_blocks": 0}, None),
    ],
)
def test_out_of_memory_names_the_key_that_makes_room_from_where_it_is(tiny_recipe, shelf, offload, advice):
    shelf.install("apart", PLUGIN.format(arguments=""))
    keys = {f"offload.{key}": value for key, value in offload.items()}
    setup = set_up(tiny_recipe, {"device.backend": "apart", **keys})
    with pytest.raises(DeviceMemoryError) as said, memory_explained(setup, "denoise", " at 64x64"):
        raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total")
    assert (advice or "stop other programs on the device.") in str(said.value)
    assert "2.50 GiB more were asked for." in str(said.value)
    whole = setup.plan.bytes.components["dit"].weights / 2**20
    streamed = f"of {whole:,.0f} MiB" in str(said.value)
    assert streamed == ("dit" in offload)
    assert ("--set" in str(said.value)) == (advice is not None)
