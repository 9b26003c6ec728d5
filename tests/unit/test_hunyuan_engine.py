"""HunyuanImage-3.0 through the engine: a tiny checkpoint in the real layout, from files to pictures."""

import inspect
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from apart_device import PLUGIN

from portable_dit.engine import Engine
from portable_dit.errors import CancelledError, RecipeError, RequestError, WeightsError
from portable_dit.loading import load_model
from portable_dit.models.hunyuan_image_3.checkpoint import stack_qkv_rows, swap_halves
from portable_dit.models.hunyuan_image_3.random_checkpoint import write_random
from portable_dit.pixels import to_pixels
from portable_dit.quantize import QuantizedExpertLinear, QuantizedLinear, quantization_report
from portable_dit.recipe import Recipe
from portable_dit.request import Request
from portable_dit.result import STAGES, Stepped
from portable_dit.sampling import predict, run_together
from portable_dit.setup import set_up
from portable_dit.stages import draw_all
from portable_dit.tiles import run_tiles
from portable_dit.weights import Checkpoint, as_tensor

SIZE = (128, 512)  # the smallest canvas has as many cells as any other
WISH = Request("a red apple", size=SIZE, steps=3, guidance_scale=5.0, seed=42)


def recipe(weights: Path | str, **changes) -> Recipe:
    keys = {"model": "hunyuan-image-3", "weights": str(weights), "device": {"backend": "cpu"}}
    return Recipe(**keys | {"precision": "float32", "prompt_cache_mib": 0} | changes)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hunyuan") / "instruct"
    write_random(folder, config="tiny", dialect="instruct", seed=0)
    return folder


@pytest.fixture(scope="module")
def engine(checkpoint):
    with Engine.load(recipe(checkpoint)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def picture(engine) -> np.ndarray:
    return engine.generate(WISH).images[0].pixels


def test_a_prompt_becomes_a_picture_of_the_size_that_was_asked_for(picture):
    assert picture.shape == (512, 128, 3)
    assert picture.dtype == np.uint8
    assert picture.std() > 20  # random weights draw noise, not a flat field


def test_the_same_request_gives_the_same_bytes(engine, picture):
    assert np.array_equal(engine.generate(WISH).images[0].pixels, picture)


def test_images_of_one_request_are_those_of_their_seeds(engine, picture):
    both = engine.generate(replace(WISH, images=2))
    assert [image.seed for image in both.images] == [42, 43]
    assert np.array_equal(both.images[0].pixels, picture)
    alone = engine.generate(replace(WISH, seed=43)).images[0].pixels
    assert np.array_equal(both.images[1].pixels, alone)


def test_the_prefix_runs_once_for_all_images_of_a_request_and_anew_for_another(engine, picture, monkeypatch):
    dit = engine.workers.loaded.model.dit
    runs, plain = [], dit.prefill

    def prefill(states):
        runs.append(states.shape)
        return plain(states)

    monkeypatch.setattr(dit, "prefill", prefill)
    both = engine.generate(replace(WISH, images=2))
    assert len(runs) == 1
    assert np.array_equal(both.images[0].pixels, picture)
    others = (
        replace(WISH, prompt="a pear"),
        replace(WISH, size=SIZE[::-1]),
        replace(WISH, guidance_scale=1.0),
    )
    apart = [engine.generate(other).images[0].pixels for other in others]
    assert len(runs) == 4
    assert np.array_equal(engine.generate(WISH).images[0].pixels, picture)
    for number, other in enumerate(others):
        assert np.array_equal(engine.generate(other).images[0].pixels, apart[number])


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "a red Apple"},
        {"seed": 43},
        {"steps": 2},
        {"guidance_scale": 4.0},
        {"guidance_scale": 1.0},
        {"guidance_rescale": 0.7},
        {"system_prompt": "be good"},
        {"use_system_prompt": "en_unified"},
    ],
    ids=lambda change: "-".join(f"{key}={value}" for key, value in change.items()),
)
def test_whatever_is_asked_for_reaches_the_picture(engine, picture, change):
    assert not np.array_equal(engine.generate(replace(WISH, **change)).images[0].pixels, picture)


def test_a_scale_of_one_or_less_is_the_branch_with_the_prompt_alone(engine):
    one = engine.generate(replace(WISH, guidance_scale=1.0)).images[0].pixels
    assert np.array_equal(engine.generate(replace(WISH, guidance_scale=0.0)).images[0].pixels, one)


def test_the_record_of_a_picture_says_what_decided_it(engine):
    record = engine.generate(replace(WISH, use_system_prompt="en_vanilla")).images[0].record
    assert record["model"] == "hunyuan-image-3"
    assert (record["steps"], record["guidance_scale"], record["size"]) == (3, 5.0, "128x512")
    assert record["system_prompt"] == "An invented text in place of en_vanilla."
    assert "system_prompt" not in engine.generate(WISH).images[0].record


def test_a_kept_prompt_is_kept_with_its_system_prompt(checkpoint):
    with Engine.load(recipe(checkpoint, prompt_cache_mib=8)) as engine:
        first = engine.generate(WISH)
        again = engine.generate(replace(WISH, seed=1))
        other = engine.generate(replace(WISH, system_prompt="be good"))
    kept = [any("kept from an earlier request" in note for note in r.notes) for r in (first, again, other)]
    assert kept == [False, True, False]


def test_previews_are_small_pictures_of_the_canvas_shape(engine):
    previews = [e.preview for e in engine.stream(WISH, previews=True) if isinstance(e, Stepped)]
    assert [None if p is None else p.shape for p in previews] == [(256, 64, 3), (256, 64, 3), None]


def test_a_request_can_be_cancelled_between_steps(engine):
    asked = iter([False, False, True])
    with pytest.raises(CancelledError):
        engine.generate(WISH, cancelled=lambda: next(asked, True))
    assert engine.generate(WISH).images


def test_a_prompt_of_no_words_and_one_too_long_are_refused(engine):
    with pytest.raises(RequestError, match="empty"):
        engine.generate(replace(WISH, prompt=" "))
    with pytest.raises(RequestError, match="takes at most"):
        engine.generate(replace(WISH, prompt="x" * 2000))


# --- forms, formats, precision ---


@pytest.mark.parametrize(("form", "steps"), [("base", 50), ("distil", 8)])
def test_the_other_forms_load_and_draw(tmp_path, form, steps):
    write_random(tmp_path / form, config="tiny", dialect=form, seed=0)
    with Engine.load(recipe(tmp_path / form)) as engine:
        spec = engine.setup.spec
        assert engine.setup.resolve(Request("x")).steps == steps
        pixels = engine.generate(replace(WISH, steps=2)).images[0].pixels
        other = engine.generate(replace(WISH, steps=2, guidance_scale=2.0)).images[0].pixels
    assert spec.guidance_branches == (2 if form == "base" else 1)
    assert pixels.std() > 20
    assert not np.array_equal(pixels, other)  # the Distil form is told the scale, the base form computes it


@pytest.mark.parametrize(
    ("format", "near"), [("fp8_row", 45), ("int8_row", 30), ("fp8_weight_only", 40)], ids=lambda v: str(v)
)
def test_a_format_reaches_dense_layers_and_experts_and_leaves_the_router(
    checkpoint, picture, format, near, caplog
):
    setup = set_up(recipe(checkpoint, quantization={"dit": format}))
    choices = setup.plan.choices("dit")
    assert {f"linear:{format}", f"experts:{format}"} <= choices.keys()
    with Engine.load(setup) as engine:
        pixels = engine.generate(WISH).images[0].pixels
    with caplog.at_level("INFO", logger="portable_dit"):
        loaded = load_model(setup)
    kernels = choices[f"linear:{format}"], choices[f"experts:{format}"]
    assert caplog.messages == [
        f"dit: 12 dense layers in {format}, kernel {kernels[0]}",
        f"dit: 6 expert layers in {format}, kernel {kernels[1]}",
    ]
    dit = loaded.model.component("dit")
    assert quantization_report(dit).layers == 3 * 6
    block = dit.layers[0]
    assert isinstance(block.self_attn.qkv_proj, QuantizedLinear)
    assert isinstance(block.mlp.experts.down_proj, QuantizedExpertLinear)
    assert block.mlp.gate.weight.dtype is torch.float32
    off = np.abs(pixels.astype(int) - picture.astype(int)).mean()
    assert 0 < off < near


def test_kernels_of_dense_layers_and_experts_are_named_apart(cli, checkpoint, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(f"model: hunyuan-image-3\nweights: {checkpoint}\nprecision: float32\n")
    out = cli("plan", "--recipe", path, "--quantization", "fp8_row", "--json").stdout
    kernels = json.loads(out)["kernels"]["dit"]
    assert kernels["linear:fp8_row"] == "emulated"
    assert kernels["experts:fp8_row"] == "each_emulated"


def test_quantised_weights_come_back_from_the_cache_as_they_were(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("PORTABLE_DIT_CACHE", str(tmp_path))
    wish = recipe(checkpoint, quantization={"dit": "fp8_row"}, cache=True)
    pictures = []
    for _ in range(2):
        with Engine.load(wish) as engine:
            pictures.append(engine.generate(WISH).images[0].pixels)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert np.array_equal(*pictures)


def test_random_weights_are_planned_at_the_published_sizes():
    """At the published sizes a plan is all that fits here; tiny ones come with a checkpoint's configs."""
    setup = set_up(recipe("random", precision="float32"))
    assert not setup.plan.fits
    assert "published sizes of the Instruct form" in setup.plan.notes[0].text


# --- loading ---


def test_only_what_pictures_need_is_read(checkpoint):
    loaded = load_model(set_up(recipe(checkpoint)))
    stored = Checkpoint.open(checkpoint).tensors(Path())
    spared = ("lm_head.", "model.ln_f.", "vae.encoder.", "vision_model.", "vision_aligner.")
    needed = [tensor.nbytes for name, tensor in stored.items() if not name.startswith(spared)]
    assert loaded.bytes_read == sum(needed)
    assert 0 < len(needed) < len(stored)


def test_experts_rest_in_the_file_s_numbers_with_halves_and_groups_in_our_order(checkpoint):
    setup = set_up(recipe(checkpoint))
    dit = load_model(setup).model.component("dit")
    stored = Checkpoint.open(checkpoint).tensors(Path())
    expert = as_tensor(stored["model.layers.2.mlp.experts.5.gate_and_up_proj.weight"]).float()
    assert torch.equal(dit.layers[2].mlp.experts.gate_and_up_proj.weight[5], swap_halves(expert))
    fused = as_tensor(stored["model.layers.1.self_attn.qkv_proj.weight"]).float()
    assert torch.equal(dit.layers[1].self_attn.qkv_proj.weight, stack_qkv_rows(fused, dit.config))


def test_a_missing_shard_and_a_missing_tensor_are_told(checkpoint, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    next(broken.glob("model-0003-*")).unlink()
    with pytest.raises(WeightsError, match=r"1 of 8 files are missing"):
        Engine.load(recipe(broken))


def test_weights_of_another_size_than_the_config_are_told_before_they_are_read(checkpoint, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    text = (broken / "config.json").read_text()
    (broken / "config.json").write_text(text.replace('"num_experts": 8', '"num_experts": 9'))
    with pytest.raises(WeightsError, match=r"experts\.gate_and_up_proj\.8\.weight") as error:
        Engine.load(recipe(broken))
    assert "9 missing" in str(error.value) or "missing:" in str(error.value)


# --- the request path, without a checkpoint's meaning ---


class Noting:
    """A loaded model that notes what each stage is given and gave, and leaves the stages as they are."""

    def __init__(self, model) -> None:
        self._model = model
        self.spec = model.spec
        self.given: dict[str, dict] = {}

    def __getattr__(self, stage):
        method = getattr(self._model, stage)
        names = list(inspect.signature(method).parameters)

        def noted(*values, **named):
            result = method(*values, **named)
            self.given[stage] = dict(zip(names, values, strict=False)) | named | {"result": result}
            return result

        return noted


@pytest.mark.parametrize(
    ("wish", "branches", "system"),
    [
        (replace(WISH, use_system_prompt="en_unified"), (0, 1), "An invented text in place of en_unified."),
        (replace(WISH, system_prompt=" Mine "), (0, 1), "Mine"),
        (replace(WISH, guidance_scale=1.0), (0,), None),
    ],
    ids=["named_system_prompt", "own_system_prompt", "no_guidance"],
)
def test_everything_of_a_request_arrives_at_the_model_and_comes_back(checkpoint, wish, branches, system):
    """The request path of the real pipeline, over weights without meaning."""
    setup = set_up(recipe(checkpoint))
    loaded = load_model(setup)
    model = Noting(loaded.model)
    request = setup.resolve(wish)
    (result,) = draw_all(
        setup,
        replace(loaded, model=model),
        [request],
        lambda place, event: None,
        lambda place: False,
        [False],
    )
    encode, prepare, noise = (model.given[stage] for stage in ("encode_prompt", "prepare", "noise"))
    assert (encode["prompt"], encode["system_prompt"]) == ("a red apple", system)
    assert encode["references"] == []
    assert (prepare["width"], prepare["height"], prepare["seed"]) == (128, 512, 42)
    assert (prepare["guidance"], prepare["branches"]) == (wish.guidance_scale, branches)
    assert prepare["schedule"].steps == 3
    assert prepare["prompt"] is encode["result"]
    assert prepare["result"].prefix.k.shape[1] == len(branches)
    drawn = torch.randn(1, 8, 32, 8, generator=torch.Generator("cpu").manual_seed(42))
    assert torch.equal(noise["result"], drawn)
    assert model.given["decode"]["latents"].shape == (1, 8, 32, 8)
    picture = result.images[0]
    assert picture.pixels.shape == (512, 128, 3)
    assert np.array_equal(picture.pixels, to_pixels(model.given["decode"]["result"]).numpy())
    assert set(result.seconds) == {*STAGES, "total"}
    assert all(result.seconds[stage] > 0 for stage in ("text_encode", "prepare", "denoise", "vae_decode"))
    assert len(picture.step_seconds) == 3


def test_what_is_left_out_of_a_request_is_the_forms_own(checkpoint):
    setup = set_up(recipe(checkpoint))
    request = setup.resolve(Request("a red apple"))
    assert (request.width, request.height, request.steps) == (256, 256, 50)
    assert (request.guidance_scale, request.system_prompt, request.seed) == (2.5, None, 0)


# --- tiles ---


def test_tiles_of_the_autoencoder_are_asked_for_or_not_drawn(checkpoint, picture):
    wish = recipe(checkpoint, vae_tiling=True)
    setup = set_up(wish)
    assert any("borders of tiles may show" in note.text for note in setup.plan.notes)
    with Engine.load(setup) as engine:
        tiled = engine.generate(WISH).images[0].pixels
    assert tiled.shape == picture.shape
    assert not np.array_equal(tiled, picture)
    assert np.abs(tiled.astype(int) - picture.astype(int)).mean() < 40
    whole = setup.plan.bytes.components["vae"].activations
    assert whole <= set_up(recipe(checkpoint)).plan.bytes.components["vae"].activations
    with pytest.raises(RecipeError, match=r"layout\.vae_tiles=2: .* Say vae_tiling=true"):
        set_up(recipe(checkpoint, layout={"vae_tiles": 2, "tensor": 2}, executor="mp"))
    with pytest.raises(RecipeError, match="vae_tiling=false: h3-mini was trained on tiles"):
        set_up(Recipe(model="h3-mini", vae_tiling=False))


@torch.no_grad()
def test_tiles_meet_without_a_seam(checkpoint):
    """A network that only enlarges gives the very picture that it gives at once, whatever the tiles."""
    model = load_model(set_up(recipe(checkpoint))).model
    latents = 0.3 * torch.randn(1, 8, 32, 26, generator=torch.Generator().manual_seed(0))
    latents = torch.nn.functional.interpolate(latents[..., ::4, ::4], size=(32, 26), mode="bilinear")

    def enlarge(z):
        return torch.nn.functional.interpolate(z[:, :3], scale_factor=16)

    shapes = []

    def run(network, tiles, most):
        shapes.append((tuple(tiles.shape), most))
        return enlarge(tiles)

    whole, tiled = (to_pixels(model.decode(latents, run=run, tile_batch=batch)) for batch in (0, 2))
    assert shapes == [((1, 8, 32, 26), 1), ((4, 8, 24, 24), 2)]
    assert (whole.int() - tiled.int()).abs().max() <= 1
    real = to_pixels(model.decode(latents, run=run_tiles, tile_batch=4)).float()  # [512, 416, 3]
    jumps = (real[1:] - real[:-1]).abs().mean(dim=(1, 2))
    borders = torch.tensor([383, 127])  # where one tile ends, and where the other begins
    assert jumps[borders].max() < 1.5 * jumps.median()


# --- offload ---


@pytest.mark.parametrize(
    "offload",
    [
        {"dit": "layerwise"},
        {"dit": "layerwise", "resident_blocks": 1, "vae": "component"},
        {"dit": "component", "text_encoder": "component"},
    ],
    ids=lambda offload: "-".join(f"{key}={value}" for key, value in offload.items()),
)
@pytest.mark.parametrize("format", [None, "fp8_row"])
def test_offload_draws_the_same_picture(checkpoint, picture, shelf, offload, format):
    """The prefix and every step pass the streamed layers, experts and all."""
    shelf.install("apart", PLUGIN.format(arguments=""))
    changes = {"quantization": {"dit": format}}
    wish = recipe(checkpoint, device={"backend": "apart"}, offload=offload, **changes)
    with Engine.load(wish) as engine:
        pixels = engine.generate(WISH).images[0].pixels
        assert engine.setup.backend.copies > 0
    if format is not None:
        with Engine.load(recipe(checkpoint, **changes)) as resident:
            picture = resident.generate(WISH).images[0].pixels
    assert np.array_equal(pixels, picture)


@torch.inference_mode()
def test_requests_of_one_length_side_by_side_draw_what_each_draws_alone(checkpoint):
    """Up to the order of sums, which is why no plan lets them: how many rows an expert takes changes."""
    model = load_model(set_up(recipe(checkpoint))).model
    schedule, asked = model.schedule(3), {"guidance": WISH.guidance_scale, "branches": (0, 1)}
    denoisers, latents = [], []
    for seed, words in enumerate(("a red apple", "a red house")):
        states = model.encode_prompt(words, (), None)
        denoisers.append(model.prepare(states, (), 128, 512, schedule, seed, **asked))
        latents.append(model.noise(128, 512, (), seed))
    together = predict(denoisers, latents, 1, run_together)
    alone = predict(denoisers, latents, 1)
    for one, other in zip(together, alone, strict=True):
        assert one.shape == (2, 8, 32, 8)
        assert torch.allclose(one, other, atol=1e-4)
    assert not torch.allclose(alone[0], alone[1], atol=1e-2)
