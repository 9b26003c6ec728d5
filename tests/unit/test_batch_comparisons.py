"""Whether a batch changes bits is tried out; until that is known, and where it does, nothing is batched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from portable_dit import Engine, Request
from portable_dit.batches import LEAST_VALUES, MOST_KNOWN, Batches
from portable_dit.recipe import make_recipe
from portable_dit.result import Drawn
from portable_dit.sampling import run_blocks, run_each, run_together

FOUR = {"batch": 4}
REFERENCE = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)


def files(result):
    return [image.data("png") for image in result.images]


def batches(result):
    return [image.batch for image in result.images]


def bits_differ(engine, size, count):
    """Whether the blocks, on what real requests give them, change a bit when they run side by side."""
    model, schedule = engine.workers.loaded.model, engine.workers.loaded.model.schedule(6)
    prompt = model.encode_prompt("a red apple", (), None)
    with torch.inference_mode():
        denoisers = [model.prepare(prompt, (), *size, schedule, seed) for seed in range(count)]
        embedded = [one.embed(model.noise(*size, (), seed), 0) for seed, one in enumerate(denoisers)]
        pairs = zip(run_together(denoisers, embedded), run_each(denoisers, embedded), strict=True)
        return not all(one.equal(other) for one, other in pairs)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", [(64, 64), (96, 64), (128, 128)])
def test_where_a_batch_changes_bits_pictures_are_drawn_one_at_a_time(tiny_recipe, engine, size, threads):
    """With these weights and two threads, 64x64 and 96x64 are such sizes on the machines that we know."""
    request = Request("a red apple", size=size, images=3)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with Engine.load(tiny_recipe, FOUR) as batching:
            differ = bits_differ(batching, size, 3)
            result, expected = batching.generate(request), engine.generate(request)
    finally:
        torch.set_num_threads(before)
    assert files(result) == files(expected)
    assert batches(result) == [1 if differ else 3] * 3
    assert [image.wanted for image in result.images] == [3] * 3
    assert ("batch: drawn one at a time, since 3 at once came out otherwise here" in result.notes) == differ
    assert any(change.startswith("batch: ") for change in result.changes) == differ


def test_another_number_of_threads_is_another_proof(batching, engine):
    """What one thread showed says nothing of two."""
    request = Request("a red apple", size=(64, 64), images=2)
    assert batches(batching.generate(request)) == [2, 2]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        differ = bits_differ(batching, (64, 64), 2)
        result, expected = batching.generate(request), engine.generate(request)
    finally:
        torch.set_num_threads(before)
    assert batches(result) == ([1, 1] if differ else [2, 2])
    assert files(result) == files(expected)
    assert batches(batching.generate(request)) == [2, 2]


FAULTY = """
import gc
import weakref
from dataclasses import replace
import torch
from apart_device import PLUGIN
from portable_dit import ops
from portable_dit.backend import API_VERSION, FusedOp
from portable_dit.cpu import CpuBackend
from portable_dit.hooks import hookimpl

def one_scale(x):  # of the whole input, as fp8_tensor has it
    scale = x.abs().amax() / 127
    return ops.swiglu((x / scale).round() * scale)

def first_positions(x, weight, eps, rotary):
    if rotary is not None:
        rotary = ops.Rotary(rotary.cos[:1], rotary.sin[:1])
    return ops.head_norm_rotary(x, weight, eps, rotary)

def first_modulation(x, branch, modulation, chunk):
    gate = modulation.rows(chunk)[:1]
    return x + gate * branch

def last_row_of_the_mate(x):
    out = ops.swiglu(x)
    out[1:, 0] = out[:-1, -1]
    return out

def other_order(x):  # where there are several pictures
    return ops.swiglu(x) if len(x) == 1 else ops.swiglu(x * 3) / 3

def no_room_for_several(x):
    if len(x) > 1:
        raise MemoryError("no room for several")
    return ops.swiglu(x)

def no_room_later(x):  # when others take the memory after it was tried
    no_room_later.calls += len(x) > 1
    if len(x) > 1 and no_room_later.calls > 8:
        raise MemoryError("no room any more")
    return ops.swiglu(x)

no_room_later.calls = 0

FAULTS = {{
    "no_room_for_several": ("swiglu", no_room_for_several),
    "no_room_later": ("swiglu", no_room_later),
    "one_scale": ("swiglu", one_scale),
    "first_positions": ("head_norm_rotary", first_positions),
    "first_modulation": ("gated_residual", first_modulation),
    "last_row_of_the_mate": ("swiglu", last_row_of_the_mate),
    "other_order": ("swiglu", other_order),
}}

class Faulty(CpuBackend):
    id = "{id}"
    api_version = API_VERSION

    def devices(self):
        return [replace(super().devices()[0], backend=self.id)]

    def fused_ops(self):
        op, run = FAULTS["{fault}"]
        return {{op: [FusedOp(op, "{fault}", run)]}}

@hookimpl
def portable_dit_backends():
    return [Faulty()]
"""


@pytest.mark.parametrize(
    "fault", ["one_scale", "first_positions", "first_modulation", "last_row_of_the_mate", "other_order"]
)
def test_a_kernel_that_looks_at_the_mates_is_found_out(tiny_recipe, shelf, fault):
    """Also by the very same request twice, which does not show what is taken from the wrong one."""
    shelf.install(fault, FAULTY.format(id=fault, fault=fault))
    keys = {"device.backend": fault}
    same = [Request("make it red", seed=1, references=(REFERENCE,))] * 2
    with Engine.load(tiny_recipe, {**keys, **FOUR}) as engine, Engine.load(tiny_recipe, keys) as alone:
        for requests in (same, [Request("a red apple", seed=1), Request("make it blue", seed=2)]):
            results = engine.generate_all(requests)
            assert [batches(result) for result in results] == [[1], [1]]
            assert "came out otherwise here" in results[0].notes[-1]
            assert [files(result) for result in results] == [files(alone.generate(one)) for one in requests]


@pytest.mark.parametrize("fault", ["no_room_for_several", "no_room_later"])
def test_where_memory_is_short_for_several_they_are_drawn_one_at_a_time(tiny_recipe, shelf, fault):
    """In the first comparison, or in the middle of a batch that fitted before."""
    shelf.install(fault, FAULTY.format(id=fault, fault=fault))
    keys = {"device.backend": fault}
    request = Request("a red apple", images=3)
    with Engine.load(tiny_recipe, keys) as alone:
        expected = files(alone.generate(request))
    told = []
    with Engine.load(tiny_recipe, {**keys, **FOUR}) as engine:
        result = engine.generate(request, on_event=told.append)
        assert files(result) == files(engine.generate(request)) == expected
    assert result.notes[-1] == "batch: drawn one at a time, since memory was short for 3 at once"
    assert batches(result) == [1, 1, 1]
    assert [(image.wanted, len(image.step_seconds)) for image in result.images] == [(3, 6)] * 3
    assert sum(isinstance(event, Drawn) for event in told) == 3


class Doubling:
    """A denoiser of one block that treats every row alike."""

    def __init__(self):
        self.calls = []
        self.blocks = (self.double,)

    def double(self, hidden):
        self.calls.append(len(hidden))
        return hidden * 2

    def join(self, arguments):
        return ()


def test_in_bfloat16_as_many_drawings_are_compared_as_show_what_rounding_hides():
    denoisers, batches = [Doubling(), Doubling()], Batches(None)
    rows = torch.zeros(1, 1024, LEAST_VALUES[torch.bfloat16] // 1024 // 8, dtype=torch.bfloat16)
    said = []
    while batches.is_open("a shape", 2):
        batches.compare("a shape", denoisers, [(rows, ())] * 2, run_blocks)
        said.append(batches.objection("a shape", 2))
    assert said[0] == "1 of 8 comparisons are done that show whether 2 at once come out the same"
    assert [answer is None for answer in said] == [False] * 7 + [True]
    assert denoisers[0].calls == [2, 1] * 8
    assert denoisers[1].calls == [1] * 8
    assert batches.objection("a shape", 3) is not None, "of three nothing is known"
    assert batches.objection("another shape", 2) is not None


def test_until_enough_is_compared_pictures_are_drawn_one_at_a_time(make_checkpoint, tmp_path, monkeypatch):
    """And nobody waits for more comparisons than take a third of the time of his own steps."""
    weights = make_checkpoint(tmp_path / "tiny")
    keys = {"model": "h3-mini", "weights": str(weights), "device.backend": "cpu", "precision": "bfloat16"}
    request = Request("a red apple", size=(256, 256), images=2)
    with Engine.load(make_recipe({}, keys)) as engine:
        expected = files(engine.generate(request))
    monkeypatch.setitem(LEAST_VALUES, torch.bfloat16, 1 << 15)  # 3 comparisons at this size
    with Engine.load(make_recipe({}, {**keys, **FOUR})) as engine:
        results = [engine.generate(request) for _ in range(4)]
    assert [files(result) for result in results] == [expected] * 4
    assert [batches(result) for result in results] == [[1, 1], [1, 1], [2, 2], [2, 2]]
    assert "1 of 3 comparisons are done" in results[0].notes[-1]
    assert "2 of 3 comparisons are done" in results[1].notes[-1]


def test_what_is_too_small_to_show_its_rounding_is_drawn_one_at_a_time(tiny_recipe):
    with Engine.load(tiny_recipe, {**FOUR, "precision": "bfloat16"}) as engine:
        result = engine.generate(Request("a red apple", images=2))
    assert batches(result) == [1, 1]
    assert "so few numbers in bfloat16" in result.notes[-1]


def test_what_is_remembered_is_bounded_and_what_is_asked_for_stays():
    batches, rows = Batches(None), torch.zeros(1, 64, 64)
    pair = [Doubling(), Doubling()]
    for number in range(MOST_KNOWN + 10):
        assert batches.is_open(number, 2)
        batches.compare(number, pair, [(rows, ())] * 2, run_blocks)
        assert batches.objection(0, 2) is None
    assert batches.is_open(1, 2), "it was forgotten, and is compared again"
    assert not batches.is_open(MOST_KNOWN + 9, 2)
