"""From a decoder's values to bytes: what is no number is an error and never a black picture."""

import shutil
from dataclasses import replace

import hunyuan_golden as golden
import pytest
import torch
from safetensors.torch import load_file, save_file

from portable_dit import Engine, Request
from portable_dit.errors import PictureError
from portable_dit.models.hunyuan_image_3.random_checkpoint import write_random
from portable_dit.pixels import is_finite, to_pixels
from portable_dit.recipe import Recipe


def test_values_are_rounded_and_clamped_with_the_channels_last():
    values = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0, 0.5 + 0.5 / 255])[None, None].expand(3, 1, -1)
    assert to_pixels(values).shape == (1, 6, 3)
    assert to_pixels(values)[0, :, 0].tolist() == [0, 0, 128, 255, 255, 128]
    assert to_pixels(values)[None].shape == (1, 1, 6, 3)


def test_planes_become_pixels_side_by_side():
    planes = torch.rand(2, 3, 5, 7)
    pixels = to_pixels(planes)
    assert pixels.is_contiguous()
    assert torch.equal(pixels.movedim(-1, -3), (planes * 255).round().to(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_that_is_no_number_is_found_wherever_it_stands(dtype):
    values = torch.ones(3, 70, 90, dtype=dtype)  # in float16 their plain sum would be no number either
    values[:, :, 30:] = -1
    assert is_finite(values * 40)
    for place in ((0, 0, 0), (2, 69, 89), (1, 31, 7)):
        for wrong in ("nan", "inf", "-inf"):
            damaged = values.clone()
            damaged[place] = float(wrong)
            assert not is_finite(damaged), (place, wrong)
    damaged[0, 0, 0], damaged[1, 1, 1] = float("inf"), float("-inf")
    assert not is_finite(damaged)


def damaged(checkpoint, folder, file, name):
    """A copy of a checkpoint with a tensor as large as its type allows, which no check refuses."""
    copy = shutil.copytree(checkpoint, folder)
    stored = load_file(copy / file)
    stored[name] = torch.full_like(stored[name], torch.finfo(stored[name].dtype).max)
    save_file(stored, copy / file)
    (copy / "manifest.json").unlink()
    return copy


@pytest.mark.parametrize(
    ("file", "name", "component"),
    [
        ("transformer/model.safetensors", "final_layer.heads.weight", "dit"),
        ("vae/model.safetensors", "decoder.proj_out.weight", "vae"),
    ],
)
def test_a_picture_that_is_no_number_is_refused_with_its_stage_and_leaves_no_file(
    cli, tiny_checkpoint, tmp_path, file, name, component
):
    weights, out = damaged(tiny_checkpoint, tmp_path / "weights", file, name), tmp_path / "out.png"
    words = ("run", "--recipe", "cpu/h3-mini", "--set", f"weights={weights}", "--prompt", "a red apple")
    ended = cli(*words, "-o", out)
    assert ended.exit_code == 1
    assert f"what came out of the {component} holds NaN or infinity" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not out.exists()


def test_the_engine_draws_again_after_a_picture_that_was_none(tiny_recipe):
    with Engine.load(tiny_recipe) as engine:
        before = engine.generate(Request("a red apple")).images[0].pixels
        vae = engine.workers.loaded.model.component("vae")
        kept = vae.post_quant_conv.weight.detach().clone()
        with torch.no_grad():
            vae.post_quant_conv.weight[0, 0] = float("nan")
        with pytest.raises(PictureError, match=r"out of the vae .*In float32 only the weights do that"):
            engine.generate(Request("a red apple"))
        with torch.no_grad():
            vae.post_quant_conv.weight.copy_(kept)
        assert (engine.generate(Request("a red apple")).images[0].pixels == before).all()


def test_each_component_of_either_model_is_watched(tmp_path):
    """The mixture of experts through its own weights, in whose last layers one value goes wrong."""
    write_random(tmp_path / "weights", config="tiny", dialect="instruct", seed=0)
    recipe = {"model": "hunyuan-image-3", "weights": str(tmp_path / "weights"), "precision": "float32"}
    with Engine.load(Recipe(**recipe, device={"backend": "cpu"})) as engine:
        model = engine.workers.loaded.model
        places = {"vae": model.vae.conv_out.bias, "dit": model.dit.final_layer.conv.bias}
        for component, bias in places.items():
            kept = bias[0].item()
            bias.data[0] = float("inf")
            with pytest.raises(PictureError, match=f"out of the {component} holds"):
                engine.generate(Request("a red apple", size=(256, 256), steps=1))
            bias.data[0] = kept


def test_float16_convolutions_overflow_into_values_that_are_found():
    """The decoder's plain path has no norm, so its sums may leave float16 where float32 holds them."""
    small = replace(golden.VAE, block_out_channels=(8, 8, 16, 16, 16), norm_num_groups=4)
    z = golden.latents(500)[:, :, :2, :2]
    for dtype, finite in ((torch.float32, True), (torch.float16, False)):
        decoder = golden.decoder(small)
        decoder.conv_in.weight.data *= 1e5
        with torch.no_grad():
            assert is_finite(decoder.to(dtype)(z)) == finite
