"""The engine on a tiny checkpoint: seeds, events, cancellation, and wishes that must reach the model."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from apart_device import PLUGIN, ApartBackend
from PIL import Image

from portable_dit import Engine, Request
from portable_dit.errors import (
    CancelledError,
    DoesNotFitError,
    PortableDitError,
    RecipeError,
    RequestError,
    WeightsError,
)
from portable_dit.result import Decoded, Drawn, Encoded, Finished, Queued, Started, Stepped, numbered
from portable_dit.setup import set_up


def test_a_picture_has_the_size_and_seed_that_were_asked_for(engine):
    result = engine.generate(Request("a red apple", size=(128, 64), seed=5))
    assert result.images[0].pixels.shape == (64, 128, 3)
    assert result.images[0].pixels.dtype == np.uint8
    assert result.images[0].seed == 5
    assert result.images[0].pixels.std() > 1


def test_a_result_is_printed_in_a_line_that_says_the_essentials(engine):
    result = engine.generate(Request("a red apple", size=(64, 96), seed=5, images=2))
    told = repr(Finished(result))
    assert told.count("Picture(64x96, seed=5, ") == 1
    assert told.count("Picture(64x96, seed=6, ") == 1
    assert told.endswith(" s))")
    assert len(told) < 200


def test_the_same_seed_is_the_same_file_byte_for_byte(engine):
    request = Request("a red apple", seed=3)
    first, second = (engine.generate(request).images[0].data("png") for _ in range(2))
    assert first == second


def test_the_file_is_the_same_whatever_else_is_in_use_on_the_device(tiny_recipe, shelf, monkeypatch):
    shelf.install("apart", PLUGIN.format(arguments=""))
    keys = {"device.backend": "apart", "offload.dit": "layerwise", "batch": 64, "device.memory_gib": 1.0}
    files, told = set(), set()
    for unused in (1 << 40, 900 << 20, 600 << 20, 310 << 20):
        monkeypatch.setattr(ApartBackend, "unused_bytes", unused)
        with Engine.load(tiny_recipe, keys) as engine:
            result = engine.generate("a red apple")
        files.add(result.images[0].data("png"))
        told.add(result.notes)
    assert len(told) == 4
    assert len(files) == 1


def test_prompt_and_seed_each_change_the_picture(engine):
    def pixels(prompt, seed):
        return engine.generate(Request(prompt, seed=seed)).images[0].pixels

    base = pixels("a red apple", 0)
    assert not np.array_equal(base, pixels("a red apple", 1))
    assert not np.array_equal(base, pixels("a green apple", 0))


def test_image_k_of_n_is_the_picture_of_seed_plus_k(engine, reference):
    for references in ((), (reference,)):
        request = Request("make it green", seed=10, images=3, references=references)
        together = engine.generate(request).images
        for k, image in enumerate(together):
            alone = engine.generate(Request("make it green", seed=10 + k, references=references)).images[0]
            assert image.seed == alone.seed == 10 + k
            assert np.array_equal(image.pixels, alone.pixels)


def test_a_reference_changes_the_picture_and_sets_its_size(engine, reference):
    plain = engine.generate(Request("make it green", size=(96, 64)))
    edited = engine.generate(Request("make it green", references=(reference,)))
    assert edited.images[0].pixels.shape == (64, 96, 3)
    assert not np.array_equal(plain.images[0].pixels, edited.images[0].pixels)


@pytest.mark.parametrize(
    ("given", "size", "canvas", "seen"),
    [
        ((64, 64), None, (64, 64), (64, 64)),  # never larger without need
        ((96, 64), None, (96, 64), (96, 64)),
        ((1500, 1000), None, (288, 192), (288, 192)),  # the largest legal canvas of that shape
        ((150, 100), None, (160, 96), (160, 96)),
        ((20, 10), None, (128, 64), (128, 64)),
        ((500, 1000), None, (160, 320), (160, 320)),
        ((96, 64), (192, 128), (192, 128), (192, 128)),  # a reference follows the canvas that was asked for
        ((64, 64), (192, 128), (192, 128), (160, 160)),  # and keeps its own shape
        ((1500, 1000), (64, 64), (64, 64), (96, 64)),
        ((64, 128), (256, 256), (256, 256), (160, 320)),
    ],
)
def test_references_are_seen_at_the_area_of_the_canvas(engine, given, size, canvas, seen):
    """As the built-in model was trained; rule `canvas` of the checkpoint."""
    pixels = np.random.default_rng(1).integers(0, 256, (given[1], given[0], 3), dtype=np.uint8)
    request = engine.setup.resolve(Request("make it green", references=(pixels,), size=size))
    assert (request.width, request.height) == canvas
    assert request.references[0].size == seen
    assert request.notes == ()
    picture = engine.generate(request).images[0].pixels
    assert picture.shape == (canvas[1], canvas[0], 3)


def test_all_references_are_sized_for_the_canvas_of_the_first(engine):
    first, second = (np.zeros((h, w, 3), np.uint8) for w, h in ((192, 128), (300, 300)))
    request = engine.setup.resolve(Request("make it green", references=(first, second)))
    assert [r.size for r in request.references] == [(192, 128), (160, 160)]


def test_a_reference_of_a_shape_that_no_canvas_has_is_refused(engine):
    sliver = np.zeros((100, 201, 3), np.uint8)
    with pytest.raises(RequestError, match=r"201x100; its sides may differ by 2:1 at most\. Crop it"):
        engine.generate(Request("make it green", references=(sliver,)))


def test_events_come_in_order_with_previews_when_asked(engine):
    request = Request("a red apple", images=2, format="png")
    events = list(engine.stream(request, previews=True))
    kinds = [type(event) for event in events]
    one_image = [Stepped] * 6 + [Decoded]
    undrawn = [kind for kind in kinds if kind is not Drawn]
    assert undrawn == [Queued, Started, Encoded, *one_image, *one_image, Finished]
    done = [(type(event), event.image) for event in events if isinstance(event, Decoded | Drawn)]
    assert [image for kind, image in done if kind is Drawn] == [0, 1]
    assert done.index((Decoded, 0)) < done.index((Drawn, 0))
    assert done[-1] == (Drawn, 1)
    steps = [event for event in events if isinstance(event, Stepped)]
    assert [(event.image, event.step) for event in steps] == [(k, s) for k in (0, 1) for s in range(1, 7)]
    assert all(
        event.preview.dtype == np.uint8 and event.preview.ndim == 3 for event in steps if event.step < 6
    )
    result = events[-1].result
    assert np.array_equal(result.images[0].pixels, engine.generate("a red apple").images[0].pixels)


def test_closing_a_stream_stops_the_drawing(engine):
    stream = engine.stream(Request("a red apple", images=100))
    for event in stream:
        if isinstance(event, Stepped):
            break
    stream.close()
    assert not any(thread.name.startswith("stream") for thread in threading.enumerate())
    assert engine.generate("a red apple").images


def test_a_cancelled_request_raises_and_the_engine_goes_on(engine):
    # Before the prompt, before the picture, and before each of its steps.
    wishes = iter([False, False, False, False, True])

    with pytest.raises(CancelledError, match="after 2 of 6 steps"):
        engine.generate("a red apple", cancelled=lambda: next(wishes))
    assert engine.generate("a red apple").images


def test_the_result_tells_times_memory_backend_and_kernels(engine):
    result = engine.generate(Request("a red apple", images=2, format="png"))
    assert set(result.seconds) == {"text_encode", "prepare", "denoise", "vae_decode", "encode_png", "total"}
    assert all(seconds > 0 for seconds in result.seconds.values())
    assert [len(image.step_seconds) for image in result.images] == [6, 6]
    assert result.peak_bytes > 50e6
    assert result.backend == "cpu"
    assert result.kernels["dit"]["attention"] != ""


def test_saving_several_numbers_them(engine, tmp_path):
    saved = engine.generate(Request("a red apple", images=2)).save(tmp_path / "a.png")
    assert [image.path.name for image in saved] == ["a-1.png", "a-2.png"]
    assert numbered(tmp_path / "a.png", 12)[0].name == "a-01.png"
    assert [image.seed for image in saved] == [0, 1]
    with Image.open(saved[0].path) as image:
        assert image.size == (saved[0].width, saved[0].height)


def test_a_request_that_breaks_a_rule_raises_before_the_first_event(engine):
    with pytest.raises(RequestError, match="multiples of 32"):
        engine.stream(Request("x", size=(100, 100)))


def test_a_prompt_of_too_many_words_is_refused(engine):
    with pytest.raises(RequestError):
        engine.generate("a red apple on " * 20)


def test_a_closed_engine_says_so(tiny_recipe):
    with Engine.load(tiny_recipe) as engine:
        pass
    with pytest.raises(PortableDitError, match=r"closed. Load another"):
        engine.generate("a red apple")


@pytest.mark.parametrize(
    "overrides",
    [
        {"offload.dit": "layerwise"},
        {"offload.dit": "layerwise", "offload.resident_blocks": 2},
        {"offload.dit": "component"},
        {"offload.text_encoder": "component", "offload.vae": "component"},
        {"offload.text_encoder": "layerwise", "offload.dit": "component"},
    ],
)
def test_offload_draws_the_same_picture(engine, tiny_recipe, reference, shelf, overrides):
    shelf.install("apart", PLUGIN.format(arguments=""))
    request = Request("make it green", references=(reference,), images=2)
    with Engine.load(tiny_recipe, {"device.backend": "apart", **overrides}) as offloaded:
        for ours, theirs in zip(
            offloaded.generate(request).images, engine.generate(request).images, strict=True
        ):
            assert np.array_equal(ours.pixels, theirs.pixels)
        assert offloaded.setup.backend.copies > 0


def test_offload_where_there_is_no_other_memory_is_left_out_and_told(engine, tiny_recipe):
    with Engine.load(tiny_recipe, {"offload.dit": "layerwise"}) as plain:
        result = plain.generate("a red apple")
        assert plain.plan.offload.dit == "none"
        assert "offload of dit is left out" in result.changes[0]
        assert np.array_equal(result.images[0].pixels, engine.generate("a red apple").images[0].pixels)
    with pytest.raises(RecipeError, match="strict: offload of dit is left out"):
        Engine.load(tiny_recipe, {"offload.dit": "layerwise"}, strict=True)


@pytest.mark.parametrize("format", ["int8_row", "fp8_row", "fp8_block128", "mxfp8"])
def test_a_quantisation_reaches_the_layers_and_changes_the_picture_a_little(engine, tiny_recipe, format):
    from portable_dit.quantize import QuantizedLinear

    base = engine.generate("a red apple").images[0].pixels.astype(int)
    with Engine.load(tiny_recipe, {"quantization.dit": format}) as quantized:
        model = quantized.workers.loaded.model
        layers = [m for m in model.component("dit").modules() if isinstance(m, QuantizedLinear)]
        assert len(layers) == 3 * 4
        assert not any(isinstance(m, QuantizedLinear) for m in model.component("vae").modules())
        pixels = quantized.generate("a red apple").images[0].pixels.astype(int)
    assert not np.array_equal(pixels, base)
    assert np.corrcoef(pixels.ravel(), base.ravel())[0, 1] > 0.8


def test_bfloat16_draws_nearly_the_same_picture(engine, tiny_recipe):
    from portable_dit.plugins import select_backend

    backend = select_backend("cpu")
    if "bfloat16" not in backend.capabilities(backend.devices()[0]).dtypes:
        pytest.skip("this processor has no bfloat16 units")
    base = engine.generate("a red apple").images[0].pixels.astype(int)
    with Engine.load(tiny_recipe, {"precision": "bfloat16"}) as half:
        pixels = half.generate("a red apple").images[0].pixels.astype(int)
    assert np.corrcoef(pixels.ravel(), base.ravel())[0, 1] > 0.9


def test_random_weights_draw_without_a_checkpoint_file(tiny_checkpoint, tmp_path, tiny_recipe):
    import shutil

    setup = set_up(tiny_recipe)
    folder = tmp_path / "bare"
    shutil.copytree(tiny_checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors", "manifest.json"))
    with pytest.raises(WeightsError, match=r"no \.safetensors file"):
        Engine.load(tiny_recipe, {"weights": str(folder)})
    assert setup.plan.fits


def test_a_plan_that_does_not_fit_is_refused_before_loading(tiny_recipe):
    loaded = []
    with pytest.raises(DoesNotFitError, match="does not fit"):
        Engine.load(tiny_recipe, {"device.memory_gib": 0.01}, on_component=loaded.append)
    assert loaded == []


def test_a_memory_limit_that_cannot_be_enforced_is_told(tiny_recipe, caplog):
    with Engine.load(tiny_recipe, {"device.memory_gib": 1.5}):
        assert "planned with, and not enforced" in caplog.text


def test_loading_leaves_nothing_on_the_meta_device_and_needs_no_gradients(engine):
    for name in ("text_encoder", "dit", "vae"):
        state = dict(engine.workers.loaded.model.component(name).named_parameters())
        assert state
        assert not any(p.is_meta or p.requires_grad for p in state.values())


def test_importing_the_package_and_reading_a_request_needs_no_torch():
    code = (
        "import sys, portable_dit; from portable_dit import Request, Recipe, load_recipe, make_plan; "
        "import portable_dit.loading, portable_dit.setup, portable_dit.manifest, portable_dit.result; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(dir(__import__("portable_dit"))) >= {"generate", "Engine", "Request"}


def test_an_unknown_public_name_is_an_attribute_error():
    import portable_dit

    with pytest.raises(AttributeError, match="nothing_like_that"):
        portable_dit.nothing_like_that  # noqa: B018


def test_what_is_taken_fewer_at_a_time_for_a_large_request_is_noted_in_its_result_alone(tiny_recipe):
    """The plan of the default size, which the engine is loaded by, has room for all."""
    with Engine.load(tiny_recipe, {"batch": 64, "device.memory_gib": 310e6 / 0.97 / 2**30}) as engine:
        assert not any("at once" in note for note in engine.generate("a red apple").notes)
        result = engine.generate(Request("a red apple", size=(256, 256)))
    assert any("pictures at once instead of 64, to fit" in note for note in result.notes)
    assert not any("at once" in note for note in result.images[0].record["notes"])


def test_several_requests_are_a_list_with_a_preview_wish_for_each():
    with Engine.load("cpu/h3-mini") as engine:
        with pytest.raises(RequestError, match=r"a list is needed, such as \['an owl'\]"):
            engine.generate_all("an owl")
        for wrong in ([], [True], [True] * 3):
            with pytest.raises(RequestError, match=f"previews: {len(wrong)} for 2 requests"):
                engine.generate_all(["an owl", "a fox"], previews=wrong)
