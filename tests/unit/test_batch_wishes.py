"""What becomes of a wish for batches that cannot be met at the moment, or not at all."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from steps_drawn import steps_drawn

from portable_dit.batches import FIRST_PAUSE, LEAST_VALUES, LONGEST_PAUSE, Batches
from portable_dit.engine import Engine
from portable_dit.errors import CancelledError, RequestError
from portable_dit.recipe import load_recipe
from portable_dit.request import Request
from portable_dit.result import Result
from portable_dit.setup import set_up

TWO = Request("a red apple", size=(64, 64), images=2)


def batches(outcome: object) -> list[tuple[int, int]]:
    assert isinstance(outcome, Result), outcome
    return [(image.batch, image.wanted) for image in outcome.images]


class ShortOfMemory:
    """A hook of a block: no memory for several pictures, as long as it says so."""

    def __init__(self, engine: Engine) -> None:
        self.short = True
        self.tried = 0
        engine.workers.loaded.model.component("dit").blocks[0].register_forward_hook(self)

    def __call__(self, module, inputs, output):
        if len(inputs[0]) > 1:
            self.tried += 1
            if self.short:
                raise MemoryError("no room for several")


def test_after_a_moment_without_memory_a_batch_is_tried_again(tiny_recipe: Path):
    with Engine.load(tiny_recipe, {"batch": 2}) as engine:
        memory = ShortOfMemory(engine)
        results = [engine.generate(TWO) for _ in range(FIRST_PAUSE + 2)]
        assert memory.tried == 2, "at first, and once more after a pause"
        assert {image for result in results for image in batches(result)} == {(1, 2)}
        assert results[-1].notes[-1] == "batch: drawn one at a time, since memory was short for 2 at once"
        memory.short = False
        for _ in range(2 * FIRST_PAUSE):
            assert batches(engine.generate(TWO)) == [(1, 2)] * 2
        for _ in range(2):
            assert batches(engine.generate(TWO)) == [(2, 2)] * 2


def test_a_pause_is_twice_as_long_each_time_and_is_of_one_shape():
    known, pauses = Batches(None), []
    for _ in range(9):
        known.pause("a shape", 2, "no room")
        asked = 0
        while known.objection("a shape", 2) == "no room":
            asked += 1
        pauses.append(asked)
        assert known.objection("a shape", 3) != "no room"
    assert pauses == [min(FIRST_PAUSE * 2**k, LONGEST_PAUSE) for k in range(9)]


def test_strict_a_batch_that_would_be_drawn_one_at_a_time_is_refused(tiny_recipe: Path):
    with Engine.load(tiny_recipe, {"batch": 2}, strict=True) as engine:
        memory = ShortOfMemory(engine)
        two, one, other = engine.generate_all([TWO, replace(TWO, images=1), replace(TWO, images=1, seed=9)])
        assert isinstance(two, RequestError)
        assert str(two).startswith(
            "strict: batch: drawn one at a time, since memory was short for 2 at once."
        )
        assert batches(one) == batches(other) == [(1, 2)], "who asked for one has it, whoever stood beside"
        memory.short = False
        for _ in range(FIRST_PAUSE - 1):  # the two others have made up one
            with pytest.raises(RequestError, match="strict: batch: "):
                engine.generate(TWO)
        assert batches(engine.generate(TWO)) == [(2, 2)] * 2


def test_strict_a_batch_that_does_not_fit_is_refused_before_it_is_loaded(tiny_recipe: Path):
    setup = set_up(load_recipe(tiny_recipe, {"batch": 4}), strict=True)
    plan = setup.plan
    setup = replace(setup, plan=replace(plan, workload=replace(plan.workload, width=96, height=64, batch=2)))
    for images, wanted in ((4, 4), (3, 3)):
        with pytest.raises(RequestError, match=f"strict: batch={wanted}: 2 of 96x64 fit side by side"):
            setup.resolve(Request("a red apple", size=(96, 64), images=images))
    for images in (1, 2):
        assert setup.resolve(Request("a red apple", size=(96, 64), images=images)).images == images


def test_who_left_on_the_way_does_not_count_among_those_drawn_together(tiny_recipe: Path):
    requests = [replace(TWO, images=1, seed=seed) for seed in range(3)]
    with Engine.load(tiny_recipe, {"batch": 3}) as engine, steps_drawn(engine) as drawn:
        engine.generate_all(requests[:2])  # so that of two it is known
        drawn.clear()
        *stayed, left = engine.generate_all(requests, cancelled=lambda place: place == 2 and len(drawn) >= 3)
    assert isinstance(left, CancelledError)
    assert [batches(one) for one in stayed] == [[(2, 2)]] * 2


def test_those_who_go_on_one_at_a_time_after_others_have_left_are_told(tiny_recipe: Path, monkeypatch):
    """Of two, fewer is known than of the three that they were."""
    monkeypatch.setitem(LEAST_VALUES, torch.float32, 1 << 15)  # some comparisons at this size, one a request
    requests = [replace(TWO, images=1, seed=seed) for seed in range(3)]
    with Engine.load(tiny_recipe, {"batch": 3}) as engine, steps_drawn(engine) as drawn:
        while batches(engine.generate_all(requests)[0]) == [(1, 3)]:
            pass
        drawn.clear()
        *stayed, _ = engine.generate_all(requests, cancelled=lambda place: place == 2 and len(drawn) >= 3)
    assert [batches(one) for one in stayed] == [[(1, 2)]] * 2
    assert re.match(r"batch: from step 2 on one at a time, since 1 of \d+ comparisons", stayed[0].notes[-1])
