"""Pictures that are denoised side by side: they stay what they are alone, or they are drawn alone."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from apart_device import PLUGIN
from PIL import Image

from portable_dit import Engine, Request
from portable_dit.batches import LEAST_VALUES, MOST_KNOWN, Batches
from portable_dit.catalog import load_recipe
from portable_dit.errors import (
    CancelledError,
    DeviceMemoryError,
    OutputError,
    RecipeError,
    RequestError,
)
from portable_dit.loading import set_up
from portable_dit.models.hunyuan_image_3.random_checkpoint import write_random
from portable_dit.recipe import make_recipe
from portable_dit.result import Decoded, Drawn, Encoded, Finished, Queued, Started, Stepped
from portable_dit.sampling import run_blocks, run_each, run_together

FOUR = {"batch": 4}


@pytest.fixture(scope="module")
def alone(tiny_recipe):
    with Engine.load(tiny_recipe) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(tiny_recipe):
    with Engine.load(tiny_recipe, FOUR) as loaded:
        yield loaded


@pytest.fixture
def references(tmp_path):
    path = tmp_path / "reference.png"
    down, across = np.mgrid[0:64, 0:96]
    Image.fromarray(np.stack([down * 3, across * 2, down + across], -1).astype(np.uint8)).save(path)
    return (path,)


def files(result):
    return [image.data("png") for image in result.images]


def batches(result):
    return [image.batch for image in result.images]


def test_images_of_one_request_share_batches_and_their_files_are_those_of_one_at_a_time(
    engine, alone, references
):
    for wish in ({}, {"size": (64, 64)}, {"size": (128, 96)}, {"references": references}):
        request = Request("a red apple", seed=7, images=6, **wish)
        together, apart = engine.generate(request), alone.generate(request)
        assert batches(together) == [4, 4, 4, 4, 2, 2]
        assert batches(apart) == [1] * 6
        assert files(together) == files(apart)
        assert [image.seed for image in together.images] == list(range(7, 13))


def test_requests_share_a_batch_whose_prompts_take_as_many_rows(engine, alone):
    """Three words, three words and five, the last of which stays by itself."""
    requests = [Request(words, seed=3) for words in ("a red apple", "make it blue", "a red apple on green")]
    results = engine.generate_all(requests)
    assert [batches(result) for result in results] == [[2], [2], [1]]
    assert [files(result) for result in results] == [files(alone.generate(one)) for one in requests]


def test_the_same_request_twice_side_by_side_is_the_same_picture_twice(engine, alone):
    first, second = engine.generate_all(["a red apple", "a red apple"])
    assert batches(first) == [2]
    assert files(first) == files(second) == files(alone.generate("a red apple"))


def test_only_requests_of_one_shape_share_a_batch(engine, alone, references):
    requests = [
        Request("a red apple", size=(96, 64)),
        Request("a red apple", size=(64, 96)),
        Request("a red apple", size=(96, 64), references=references),
        Request("a red apple", size=(96, 64), references=references * 2),
        Request("a red apple", size=(64, 96), seed=1, images=2),
    ]
    results = engine.generate_all(requests)
    assert [batches(result) for result in results] == [[1], [3], [1], [1], [3, 3]]
    assert [files(result) for result in results] == [files(alone.generate(one)) for one in requests]


def test_what_is_wrong_with_one_request_is_its_own(engine, alone):
    fine = Request("a red apple", seed=4)
    told = []
    outcomes = engine.generate_all(
        [Request("a red apple", size=(1, 1)), fine, Request("a " * 190), fine],
        on_event=lambda place, event: told.append((place, type(event))),
    )
    assert [type(outcomes[place]) for place in (0, 2)] == [RequestError, RequestError]
    assert files(outcomes[1]) == files(outcomes[3]) == files(alone.generate(fine))
    assert batches(outcomes[1]) == [2]
    assert {place for place, _ in told} == {1, 3}, "a request that breaks a rule is never queued"
    assert [kind for place, kind in told if place == 1] == [
        *(Queued, Started, Encoded),
        *[Stepped] * 6,
        *(Decoded, Drawn, Finished),
    ]
    assert engine.generate_all([]) == ()


def test_a_file_that_cannot_be_made_is_the_error_of_its_request(engine, alone):
    """As a JPEG whose record is too long for one."""
    right = engine.setup.resolve(Request("a red apple", seed=2, format="png"))
    wrong, result = engine.generate_all([replace(right, format="tiff", images=2), right])
    assert isinstance(wrong, OutputError)
    assert files(result) == files(alone.generate(right))
    assert batches(result) == [3]


def test_a_request_ends_as_soon_as_its_own_pictures_are_there(engine):
    """A batch of one size is drawn before the next, and nobody waits for the others' to be told."""
    order = []
    engine.generate_all(
        [Request("a red apple"), Request("a red apple", size=(64, 64))],
        on_event=lambda place, event: order.append((place, type(event))),
    )
    assert order.index((0, Finished)) < order.index((1, Stepped))


def test_events_name_the_image_and_previews_go_to_those_who_want_them(engine):
    steps = []

    def heard(place, event):
        if isinstance(event, Stepped):
            steps.append((event.step, place, event.image, event.preview is not None))

    engine.generate_all(
        [Request("a red apple", images=2), Request("a red apple", seed=9)],
        on_event=heard,
        previews=[True, False],
    )
    expected = [
        (step, place, image, place == 0 and step < 6)
        for step in range(1, 7)
        for place, image in ((0, 0), (0, 1), (1, 0))
    ]
    assert steps == expected


def test_the_time_of_a_batch_counts_once_for_a_request_and_is_each_pictures(engine):
    result = engine.generate(Request("a red apple", images=4))
    times = {image.seconds["denoise"] for image in result.images}
    assert len(times) == 1
    assert result.seconds["denoise"] == times.pop()
    assert len({image.step_seconds for image in result.images}) == 1
    assert result.seconds["vae_decode"] == sum(image.seconds["vae_decode"] for image in result.images)


def test_who_is_cancelled_leaves_at_the_next_step_and_the_others_stay_what_they_are(engine, alone):
    requests = [Request("a red apple", seed=seed, images=1 + (seed == 2)) for seed in (1, 2, 3)]
    seen = dict.fromkeys(range(3), 0)

    def heard(place, event):
        seen[place] += isinstance(event, Stepped)

    outcomes = engine.generate_all(
        requests, on_event=heard, cancelled=lambda place: place == 1 and seen[1] >= 4
    )
    assert isinstance(outcomes[1], CancelledError)
    assert "after" in str(outcomes[1])
    assert seen[1] < 12
    assert (seen[0], seen[2]) == (6, 6)
    assert [files(outcomes[place]) for place in (0, 2)] == [
        files(alone.generate(requests[place])) for place in (0, 2)
    ]


def test_when_all_are_cancelled_the_device_is_free_at_the_next_step(engine):
    steps = []

    def heard(place, event):
        if isinstance(event, Stepped):
            steps.append(event.step)

    wanted = [Request("a red apple", seed=seed) for seed in range(4)]
    outcomes = engine.generate_all(wanted, on_event=heard, cancelled=lambda place: 2 in steps)
    assert all(isinstance(outcome, CancelledError) for outcome in outcomes)
    assert max(steps) <= 4  # what the caller says reaches the drawing thread at once, but not before


def test_an_error_of_whoever_is_told_stops_all(engine, alone):
    def heard(place, event):
        if isinstance(event, Stepped) and place == 1:
            raise OSError("no room for this event")

    with pytest.raises(OSError, match="no room"):
        engine.generate_all(["a red apple", "a red apple"], on_event=heard)
    assert files(engine.generate("a red apple")) == files(alone.generate("a red apple"))


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
def test_where_a_batch_changes_bits_pictures_are_drawn_one_at_a_time(tiny_recipe, alone, size, threads):
    """With these weights and two threads, 64x64 and 96x64 are such sizes on the machines that we know."""
    request = Request("a red apple", size=size, images=3)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with Engine.load(tiny_recipe, FOUR) as engine:
            differ = bits_differ(engine, size, 3)
            result, expected = engine.generate(request), alone.generate(request)
    finally:
        torch.set_num_threads(before)
    assert files(result) == files(expected)
    assert batches(result) == [1 if differ else 3] * 3
    assert [image.wanted for image in result.images] == [3] * 3
    assert ("batch: drawn one at a time, since 3 at once came out otherwise here" in result.notes) == differ
    assert any(change.startswith("batch: ") for change in result.changes) == differ


def test_another_number_of_threads_is_another_proof(engine, alone):
    """What one thread showed says nothing of two."""
    request = Request("a red apple", size=(64, 64), images=2)
    assert batches(engine.generate(request)) == [2, 2]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        differ = bits_differ(engine, (64, 64), 2)
        result, expected = engine.generate(request), alone.generate(request)
    finally:
        torch.set_num_threads(before)
    assert batches(result) == ([1, 1] if differ else [2, 2])
    assert files(result) == files(expected)
    assert batches(engine.generate(request)) == [2, 2]


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
def test_a_kernel_that_looks_at_the_mates_is_found_out(tiny_recipe, shelf, references, fault):
    """Also by the very same request twice, which does not show what is taken from the wrong one."""
    shelf.install(fault, FAULTY.format(id=fault, fault=fault))
    keys = {"device.backend": fault}
    same = [Request("make it red", seed=1, references=references)] * 2
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


def test_notes_of_a_batch_are_not_in_the_file(engine, alone):
    """Which holds nothing that differs between equal pictures."""
    with Engine.load(alone.setup.recipe.model_copy(update={"batch": 4, "precision": "bfloat16"})) as other:
        result = other.generate(Request("a red apple", images=2))
        assert "batch:" in result.notes[-1]
        assert not any("batch" in note for note in result.images[0].record["notes"])


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({"batch": 0}, "must be at least 1"),
        ({"batch": 65}, "must be at most 64"),
        ({"batch": "all"}, "must be a whole number"),
        ({"batch": 2, "quantization.dit": "fp8_tensor"}, "one scale for all rows of an input"),
    ],
)
def test_a_batch_that_cannot_be_had_is_refused_with_the_rule(keys, rule):
    with pytest.raises(RecipeError, match=rule):
        set_up(load_recipe("cpu/h3-mini", keys))


def test_a_mixture_of_experts_is_not_drawn_in_batches(tmp_path):
    """How many rows its experts take depends on the numbers, so no drawing on others can show anything."""
    write_random(tmp_path / "hunyuan", config="tiny", dialect="instruct", seed=0)
    keys = {"model": "hunyuan-image-3", "weights": str(tmp_path / "hunyuan"), "device.backend": "cpu"}
    with pytest.raises(RecipeError, match=r"batch=2: .* is a mixture of experts"):
        set_up(make_recipe({}, {**keys, "batch": 2}))
    assert set_up(make_recipe({}, keys)).plan.workload.batch == 1


def test_what_is_remembered_is_bounded_and_what_is_asked_for_stays():
    batches, rows = Batches(None), torch.zeros(1, 64, 64)
    pair = [Doubling(), Doubling()]
    for number in range(MOST_KNOWN + 10):
        assert batches.is_open(number, 2)
        batches.compare(number, pair, [(rows, ())] * 2, run_blocks)
        assert batches.objection(0, 2) is None
    assert batches.is_open(1, 2), "it was forgotten, and is compared again"
    assert not batches.is_open(MOST_KNOWN + 9, 2)


@pytest.mark.parametrize(
    ("device", "keys"),
    [
        ("", {"offload.dit": "layerwise", "offload.text_encoder": "layerwise", "offload.vae": "component"}),
        ("", {"offload.dit": "component", "offload.text_encoder": "component", "offload.vae": "component"}),
        ("GraphLimits(supported=True, default_on=True)", {}),
        ("GraphLimits(supported=True, default_on=True, max_live=2)", {}),
        ("GraphLimits(supported=True, default_on=True), captures=False", {}),
    ],
    ids=["layerwise", "component", "captured", "captured_again_and_again", "not_captured"],
)
def test_a_batch_is_what_its_pictures_are_where_weights_visit_and_calls_are_captured(
    tiny_recipe, shelf, references, device, keys
):
    shelf.install(
        "apart", f"from portable_dit.capabilities import GraphLimits\n{PLUGIN.format(arguments=device)}"
    )
    requests = [
        Request("make it red", seed=3, images=2, references=references),
        Request("a red apple", seed=1, references=references),
        Request("a red apple", seed=1, size=(64, 64)),
    ]
    with Engine.load(tiny_recipe, {"device.backend": "apart", **keys}) as alone:
        expected = [files(alone.generate(request)) for request in requests]
    with Engine.load(tiny_recipe, {"device.backend": "apart", **keys, **FOUR}) as engine:
        for _ in range(2):
            results = engine.generate_all(requests)
            assert [batches(result) for result in results] == [[3, 3], [3], [1]]
            assert [files(result) for result in results] == expected


def test_an_error_that_is_kept_keeps_no_tensor(tiny_recipe):
    """Which on a device would be the memory that the next request needs."""
    seen = []

    def short(module, inputs, output):
        seen.append(weakref.ref(inputs[0]))
        raise MemoryError("no room")

    with Engine.load(tiny_recipe, FOUR) as engine:
        block = engine.workers.loaded.model.component("dit").blocks[1]
        hook = block.register_forward_hook(short)
        gc.disable()
        try:
            outcomes = engine.generate_all(["a red apple", "make it blue"])
            assert all(isinstance(outcome, DeviceMemoryError) for outcome in outcomes)
            assert len(seen) == 3
            assert all(tensor() is None for tensor in seen)
        finally:
            gc.enable()
            hook.remove()
        assert engine.generate("a red apple").images
