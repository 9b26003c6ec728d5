"""Pictures that are denoised side by side: they stay what they are alone, or they are drawn alone."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
from apart_device import PLUGIN
from steps_drawn import steps_drawn

from portable_dit import Engine, Request
from portable_dit.catalog import load_recipe
from portable_dit.errors import (
    CancelledError,
    DeviceMemoryError,
    OutputError,
    RecipeError,
    RequestError,
)
from portable_dit.models.hunyuan_image_3.random_checkpoint import write_random
from portable_dit.recipe import make_recipe
from portable_dit.result import Decoded, Drawn, Encoded, Finished, Queued, Started, Stepped
from portable_dit.setup import set_up

FOUR = {"batch": 4}


def files(result):
    return [image.data("png") for image in result.images]


def batches(result):
    return [image.batch for image in result.images]


def test_images_of_one_request_share_batches_and_their_files_are_those_of_one_at_a_time(
    batching, engine, reference
):
    for wish in ({}, {"size": (64, 64)}, {"size": (128, 96)}, {"references": (reference,)}):
        request = Request("a red apple", seed=7, images=6, **wish)
        together, apart = batching.generate(request), engine.generate(request)
        assert batches(together) == [4, 4, 4, 4, 2, 2]
        assert batches(apart) == [1] * 6
        assert files(together) == files(apart)
        assert [image.seed for image in together.images] == list(range(7, 13))


def test_requests_share_a_batch_whose_prompts_take_as_many_rows(batching, engine):
    """Three words, three words and five, the last of which stays by itself."""
    requests = [Request(words, seed=3) for words in ("a red apple", "make it blue", "a red apple on green")]
    results = batching.generate_all(requests)
    assert [batches(result) for result in results] == [[2], [2], [1]]
    assert [files(result) for result in results] == [files(engine.generate(one)) for one in requests]


def test_the_same_request_twice_side_by_side_is_the_same_picture_twice(batching, engine):
    first, second = batching.generate_all(["a red apple", "a red apple"])
    assert batches(first) == [2]
    assert files(first) == files(second) == files(engine.generate("a red apple"))


def test_only_requests_of_one_shape_share_a_batch(batching, engine, reference):
    requests = [
        Request("a red apple", size=(96, 64)),
        Request("a red apple", size=(64, 96)),
        Request("a red apple", size=(96, 64), references=(reference,)),
        Request("a red apple", size=(96, 64), references=(reference,) * 2),
        Request("a red apple", size=(64, 96), seed=1, images=2),
    ]
    results = batching.generate_all(requests)
    assert [batches(result) for result in results] == [[1], [3], [1], [1], [3, 3]]
    assert [files(result) for result in results] == [files(engine.generate(one)) for one in requests]


def test_what_is_wrong_with_one_request_is_its_own(batching, engine):
    fine = Request("a red apple", seed=4)
    told = []
    outcomes = batching.generate_all(
        [Request("a red apple", size=(1, 1)), fine, Request("a " * 190), fine],
        on_event=lambda place, event: told.append((place, type(event))),
    )
    assert [type(outcomes[place]) for place in (0, 2)] == [RequestError, RequestError]
    assert files(outcomes[1]) == files(outcomes[3]) == files(engine.generate(fine))
    assert batches(outcomes[1]) == [2]
    assert {place for place, _ in told} == {1, 3}, "a request that breaks a rule is never queued"
    assert [kind for place, kind in told if place == 1] == [
        *(Queued, Started, Encoded),
        *[Stepped] * 6,
        *(Decoded, Drawn, Finished),
    ]
    assert batching.generate_all([]) == ()


def test_a_file_that_cannot_be_made_is_the_error_of_its_request(batching, engine):
    """As a JPEG whose record is too long for one."""
    right = batching.setup.resolve(Request("a red apple", seed=2, format="png"))
    wrong, result = batching.generate_all([replace(right, format="tiff", images=2), right])
    assert isinstance(wrong, OutputError)
    assert files(result) == files(engine.generate(right))
    assert batches(result) == [3]


def test_a_request_ends_as_soon_as_its_own_pictures_are_there(batching):
    """A batch of one size is drawn before the next, and nobody waits for the others' to be told."""
    order = []
    batching.generate_all(
        [Request("a red apple"), Request("a red apple", size=(64, 64))],
        on_event=lambda place, event: order.append((place, type(event))),
    )
    assert order.index((0, Finished)) < order.index((1, Stepped))


def test_events_name_the_image_and_previews_go_to_those_who_want_them(batching):
    steps = []

    def heard(place, event):
        if isinstance(event, Stepped):
            steps.append((event.step, place, event.image, event.preview is not None))

    batching.generate_all(
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


def test_the_time_of_a_batch_counts_once_for_a_request_and_is_each_pictures(batching):
    result = batching.generate(Request("a red apple", images=4))
    times = {image.seconds["denoise"] for image in result.images}
    assert len(times) == 1
    assert result.seconds["denoise"] == times.pop()
    assert len({image.step_seconds for image in result.images}) == 1
    assert result.seconds["vae_decode"] == sum(image.seconds["vae_decode"] for image in result.images)


def test_who_is_cancelled_leaves_at_the_next_step_and_the_others_stay_what_they_are(batching, engine):
    requests = [Request("a red apple", seed=seed, images=1 + (seed == 2)) for seed in (1, 2, 3)]
    batching.generate_all(requests)  # from here on it is known what may be side by side
    heard = dict.fromkeys(range(3), 0)

    def hear(place, event):
        heard[place] += isinstance(event, Stepped)

    with steps_drawn(batching) as drawn:
        outcomes = batching.generate_all(
            requests, on_event=hear, cancelled=lambda place: place == 1 and len(drawn) >= 2 * 4
        )
    assert isinstance(outcomes[1], CancelledError)
    assert "after 2 of 6 steps" in str(outcomes[1])
    assert heard == {0: 6, 1: 2 * 2, 2: 6}
    assert [files(outcomes[place]) for place in (0, 2)] == [
        files(engine.generate(requests[place])) for place in (0, 2)
    ]


def test_when_all_are_cancelled_the_device_is_free_at_the_next_step(batching):
    wanted = [Request("a red apple", seed=seed) for seed in range(4)]
    batching.generate_all(wanted)
    with steps_drawn(batching) as drawn:
        outcomes = batching.generate_all(wanted, cancelled=lambda place: len(drawn) >= 2 * 4)
    assert ["after 2 of 6 steps" in str(outcome) for outcome in outcomes] == [True] * 4
    assert len(drawn) == 2 * 4


def test_an_error_of_whoever_is_told_stops_all(batching, engine):
    def heard(place, event):
        if isinstance(event, Stepped) and place == 1:
            raise OSError("no room for this event")

    with pytest.raises(OSError, match="no room"):
        batching.generate_all(["a red apple", "a red apple"], on_event=heard)
    assert files(batching.generate("a red apple")) == files(engine.generate("a red apple"))


def test_notes_of_a_batch_are_not_in_the_file(batching, engine):
    """Which holds nothing that differs between equal pictures."""
    with Engine.load(engine.setup.recipe.model_copy(update={"batch": 4, "precision": "bfloat16"})) as other:
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
    tiny_recipe, shelf, reference, device, keys
):
    shelf.install(
        "apart", f"from portable_dit.capabilities import GraphLimits\n{PLUGIN.format(arguments=device)}"
    )
    requests = [
        Request("make it red", seed=3, images=2, references=(reference,)),
        Request("a red apple", seed=1, references=(reference,)),
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
