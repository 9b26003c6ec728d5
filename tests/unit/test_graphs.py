"""Captured calls: one graph for each shape, the same picture as without, no silence when a capture fails."""

from __future__ import annotations

import numpy as np
import pytest
from apart_device import PLUGIN

from portable_dit import Engine, Request
from portable_dit.errors import BackendError

ALWAYS = "GraphLimits(supported=True, default_on=True)"


@pytest.fixture
def apart(shelf, tiny_recipe):
    """Loads the tiny model on the device apart: apart(arguments of its backend, overrides)."""
    installed = []

    def load(arguments, overrides=None, **wishes):
        if arguments not in installed:
            installed.append(arguments)
            shelf.install(
                "apart",
                "from portable_dit.capabilities import GraphLimits" + PLUGIN.format(arguments=arguments),
            )
        return Engine.load(tiny_recipe, {"device.backend": "apart", **(overrides or {})}, **wishes)

    return load


@pytest.fixture(scope="module")
def eager(tiny_recipe):
    with Engine.load(tiny_recipe) as engine:
        yield engine


@pytest.fixture
def reference():
    return np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)


def test_a_replayed_picture_is_the_eager_one_to_the_bit(apart, eager, reference):
    requests = (
        Request("a red apple", images=2),
        Request("a green apple", seed=9),
        Request("make it green", references=(reference,)),
        Request("make it blue", references=(255 - reference,)),
        Request("a red apple", size=(128, 96)),
        Request("a green apple"),
    )
    with apart(ALWAYS) as graphed:
        for request in requests:
            for ours, theirs in zip(
                graphed.generate(request).images, eager.generate(request).images, strict=True
            ):
                assert np.array_equal(ours.pixels, theirs.pixels)
        assert graphed.generate("a red apple").changes == ()


def test_there_is_one_graph_for_each_shape_and_it_serves_every_step_and_request(apart):
    with apart(ALWAYS) as graphed:
        backend = graphed.setup.backend
        for prompt in ("a red apple", "a green apple", "the blue apple"):
            graphed.generate(prompt)
        assert len(backend.captured) == 2  # blocks and tiles
        assert backend.replayed == [*([0] * 6), 1] * 3
        graphed.generate(Request("a red apple", size=(128, 96)))
        assert len(backend.captured) == 4
        graphed.generate("a red apple")
        assert len(backend.captured) == 4


def test_no_more_graphs_are_kept_than_the_device_takes(apart, eager):
    with apart("GraphLimits(supported=True, default_on=True, max_live=2)") as graphed:
        for size in ((96, 64), (128, 96), (96, 64)):
            request = Request("a red apple", size=size)
            drawn = graphed.generate(request).images[0]
            assert np.array_equal(drawn.pixels, eager.generate(request).images[0].pixels)
        assert len(graphed.setup.backend.captured) == 6


@pytest.mark.parametrize(
    ("arguments", "overrides", "graphs"),
    [
        (ALWAYS, {"graphs.dit": False}, 1),
        (ALWAYS, {"graphs.dit": False, "graphs.vae": False}, 0),
        ("GraphLimits(supported=True)", {}, 0),
        ("GraphLimits(supported=True)", {"graphs.vae": True}, 1),
        (ALWAYS, {"offload.dit": "layerwise"}, 1),
        (ALWAYS, {"offload.dit": "component", "offload.vae": "component"}, 0),
        ("", {}, 0),
    ],
)
def test_only_what_the_plan_says_is_captured(apart, arguments, overrides, graphs):
    with apart(arguments, overrides) as engine:
        engine.generate("a red apple")
        assert len(engine.setup.backend.captured) == graphs
        assert sum(engine.plan.graphs.values()) == graphs


def test_a_capture_that_fails_is_told_and_the_picture_drawn_eagerly(apart, eager):
    with apart(f"{ALWAYS}, captures=False") as engine:
        result = engine.generate("a red apple")
        assert any("graphs.dit: the backend did not capture" in change for change in result.changes)
        assert any("graphs.vae" in note for note in result.images[0].record["notes"])
        assert np.array_equal(result.images[0].pixels, eager.generate("a red apple").images[0].pixels)


def test_a_capture_that_fails_is_refused_when_strict(apart):
    with (
        apart(f"{ALWAYS}, captures=False", strict=True) as engine,
        pytest.raises(BackendError, match=r"strict: graphs\.dit.*--enforce-eager"),
    ):
        engine.generate("a red apple")


def test_with_room_for_one_size_each_is_captured_anew_and_draws_the_same(apart, eager):
    sizes = ((96, 64), (128, 96), (96, 64), (96, 64))
    with apart(ALWAYS) as graphed:
        for size in sizes[:2]:
            graphed.generate(Request("a red apple", size=size))
        both = graphed.setup.backend.held()
    with apart(ALWAYS, {"graphs.memory_gib": (both - 1) / 2**30}) as graphed:
        counts = []
        for size in sizes:
            request = Request("a red apple", size=size)
            result = graphed.generate(request)
            assert np.array_equal(result.images[0].pixels, eager.generate(request).images[0].pixels)
            assert result.changes == ()
            assert graphed.setup.backend.held() < both
            counts.append(len(graphed.setup.backend.captured))
    assert counts == [2, 4, 6, 6]


def test_a_call_that_is_larger_than_its_memory_runs_eagerly_with_a_note(apart, eager):
    little = {"graphs.memory_gib": 1e-6}
    with apart(ALWAYS, little) as engine:
        result = engine.generate("a red apple")
        assert engine.setup.backend.held() == 0
    assert any("graphs.dit: a captured call would hold more" in change for change in result.changes)
    assert "graphs.memory_gib" in " ".join(result.images[0].record["notes"])
    assert np.array_equal(result.images[0].pixels, eager.generate("a red apple").images[0].pixels)
    with (
        apart(ALWAYS, little, strict=True) as engine,
        pytest.raises(BackendError, match=r"graphs\.memory_gib"),
    ):
        engine.generate("a red apple")


def test_a_text_encoder_without_room_gets_that_of_captured_calls(apart, eager):
    with apart(f"{ALWAYS}, beside=0", {"prompt_cache_mib": 0}) as engine:
        assert not any("let go" in note for note in engine.generate("a red apple").notes)
        result = engine.generate("a green apple")
    assert any("captured calls were let go" in note for note in result.notes)
    assert result.changes == ()
    assert "let go" not in " ".join(result.images[0].record["notes"])
    assert np.array_equal(result.images[0].pixels, eager.generate("a green apple").images[0].pixels)


def test_what_runs_eagerly_of_one_request_is_not_noted_at_another_that_is_drawn_with_it(apart):
    small, large = Request("a red apple", size=(64, 64)), Request("a red apple", size=(128, 96))
    with apart(ALWAYS, {"graphs.vae": False}) as engine:
        engine.generate(small)
        enough = engine.setup.backend.held() / 2**30
    with apart(ALWAYS, {"graphs.vae": False, "graphs.memory_gib": enough}) as engine:
        alone = engine.generate(small).images[0].data("png")
        for order in ((large, small), (small, large)):
            results = dict(zip(order, engine.generate_all(order), strict=True))
            assert any("graphs.dit" in change for change in results[large].changes)
            assert results[small].changes == ()
            assert results[small].images[0].data("png") == alone


def test_a_batch_that_is_too_large_to_be_captured_leaves_the_files_as_they_are_alone(apart):
    requests = [Request("a red apple", seed=1), Request("a red apple", seed=2)]
    keys = {"batch": 2, "graphs.vae": False}
    with apart(ALWAYS, keys) as engine:
        engine.generate(requests[0])
        enough = engine.setup.backend.held() / 2**30
    with apart(ALWAYS, {**keys, "graphs.memory_gib": enough}) as engine:
        together = engine.generate_all(requests)
        for request, result in zip(requests, together, strict=True):
            assert result.images[0].batch == 2
            assert any("graphs.dit" in change for change in result.changes)
            alone = engine.generate(request)
            assert alone.changes == ()
            assert alone.images[0].data("png") == result.images[0].data("png")
