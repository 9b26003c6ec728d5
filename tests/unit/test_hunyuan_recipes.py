"""The recipes of HunyuanImage-3.0: each fits its machine, and its bytes agree with what is published."""

from functools import partial

import pytest
import recipe_machines

from portable_dit.models import read_spec
from portable_dit.models.spec import Workload
from portable_dit.recipe import load_recipe, named_recipes
from portable_dit.scaling import legal_layouts

NAMES = [name for name in named_recipes() if name.startswith("nvidia/") and "/hunyuan-image-3-" in name]
SPEC = read_spec("hunyuan-image-3", "random")
SQUARE = Workload(1024, 1024, 256)
H100 = "nvidia/h100/hunyuan-image-3-4x-"

planned = partial(recipe_machines.planned, spec=SPEC)


def test_every_layout_that_is_published_has_its_recipe():
    assert set(NAMES) >= {
        f"{H100}tp2-cfg2-fp8",
        f"{H100}tp2-sp2-fp8",
        f"{H100}tp4-ep-bf16",
        f"{H100}tp4-fp8",
        "nvidia/h100/hunyuan-image-3-8x-tp4-cfg2-fp8",
        "nvidia/h200/hunyuan-image-3-1x-fp8",
        "nvidia/h200/hunyuan-image-3-2x-cfg2-fp8",
        "nvidia/h200/hunyuan-image-3-2x-tp2-bf16",
        "nvidia/h200/hunyuan-image-3-4x-tp2-cfg2-bf16",
        "nvidia/h200/hunyuan-image-3-8x-tp4-cfg2-bf16",
        "nvidia/rtxpro6000/hunyuan-image-3-2x-cfg2-fp8",
        "nvidia/rtxpro6000/hunyuan-image-3-2x-tp2-bf16",
    }


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_its_machine_at_every_canvas_and_with_a_long_system_prompt(name):
    for width, height in SPEC.sizes.canvases:
        plan = planned(name, Workload(width, height, 3000))
        assert plan.fits, f"{width}x{height}: {plan.verdict}"


@pytest.mark.parametrize("name", NAMES)
def test_it_has_the_guidance_of_its_family_and_as_many_devices_as_its_name_says(name):
    recipe = load_recipe(name)
    assert recipe.device.count == int(name.partition("-image-3-")[2][0])
    assert recipe.sampling.guidance_scale == 5.0


def test_the_published_figures_stand_as_references():
    figures = {
        name.removeprefix(H100): load_recipe(name).reference["text_to_image_1024"]
        for name in NAMES
        if name.startswith(H100) and name.endswith("fp8")
    }
    assert {name: (f["seconds"], f["peak_gb_per_device"]) for name, f in figures.items()} == {
        "tp4-fp8": (13.7, 47),
        "tp2-sp2-fp8": (12.1, 66),
        "tp2-cfg2-fp8": (10.0, 66),
    }


def test_what_a_layout_decides_agrees_with_the_published_peaks():
    """From four to two parts the published peak grows by 19 GB; the plan's must, within a tenth."""
    four, two, guided = (
        planned(H100 + name, SQUARE).bytes.peak / 1e9 for name in ("tp4-fp8", "tp2-sp2-fp8", "tp2-cfg2-fp8")
    )
    assert two - four == pytest.approx(66 - 47, rel=0.1)
    assert guided - four == pytest.approx(66 - 47, rel=0.1)


def test_the_layers_of_each_device_are_the_published_bytes():
    """19.97 and 39.93 GB of fp8 layers, and 39.9 of bfloat16 ones with whole experts on each device."""
    for name, layers in (("tp4-fp8", 19.97), ("tp2-sp2-fp8", 39.93), ("tp4-ep-bf16", 39.93)):
        dit = planned(H100 + name, SQUARE).bytes.components["dit"]
        assert dit.block * dit.num_blocks / 1e9 == pytest.approx(layers, rel=0.002)


def test_the_plan_stays_below_the_published_peaks_by_what_is_not_held_here():
    """Word head, vision tower, both directions of the autoencoder, and its decoding as it is written."""
    for name, published in (("tp4-fp8", 47), ("tp2-sp2-fp8", 66), ("tp2-cfg2-fp8", 66)):
        assert published - 20.8 < planned(H100 + name, SQUARE).bytes.peak / 1e9 < published


def test_one_h200_holds_the_fp8_model_in_a_hundred_gigabytes():
    assert planned("nvidia/h200/hunyuan-image-3-1x-fp8", SQUARE).bytes.peak < 100e9


def test_layouts_that_are_compared_assume_no_tiles_of_a_picture_that_is_decoded_whole():
    found = list(legal_layouts(SPEC, 8))
    assert {layout.vae_tiles for layout in found} == {1}
    assert {layout.ring for layout in found} == {1}
    assert {layout.guidance for layout in found} == {1, 2}
    assert {layout.tensor for layout in found} == {1, 2, 4, 8}
