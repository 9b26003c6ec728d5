"""What a plan and a request know of HunyuanImage-3.0: sizes, steps, guidance, layers, layouts, bytes."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from portable_dit.errors import RecipeError, RequestError, WeightsError
from portable_dit.layout import Layout, layout_problems
from portable_dit.machine_file import load_machine
from portable_dit.models import read_spec
from portable_dit.models.hunyuan_image_3.buckets import canvases
from portable_dit.models.hunyuan_image_3.config import (
    DiTConfig,
    GenerationConfig,
    HunyuanConfig,
    config_json,
)
from portable_dit.models.hunyuan_image_3.model import build
from portable_dit.models.hunyuan_image_3.random_checkpoint import TINY
from portable_dit.models.hunyuan_image_3.spec import make_spec
from portable_dit.models.spec import Numbers, Workload
from portable_dit.plan import make_plan
from portable_dit.recipe import Recipe
from portable_dit.request import Request, validate_request
from portable_dit.sampling import guided
from portable_dit.setup import set_up

FULL = HunyuanConfig()
SPEC = make_spec("hunyuan-image-3", FULL)
DISTIL = make_spec(
    "hunyuan-image-3",
    replace(
        FULL,
        dit=replace(DiTConfig(), cfg_distilled=True, use_meanflow=True),
        generation=GenerationConfig(diff_infer_steps=8),
    ),
)
MACHINES = Path(__file__).parents[1] / "data" / "machines"


def refused(request: Request, spec=SPEC) -> str:
    with pytest.raises(RequestError) as error:
        validate_request(request, spec)
    return str(error.value)


# --- sizes ---


def test_canvases_are_the_published_walk_from_the_square():
    """Height by width, in the order of the shape tokens."""
    walk = [(512, width) for width in range(2048, 1535, -64)]
    walk += [(576, 1472), (640, 1408), (704, 1344), (768, 1280), (832, 1216), (896, 1152), (960, 1088)]
    walk += [(1024, 1024), (1088, 960), (1152, 896), (1216, 832), (1280, 768), (1344, 704), (1408, 640)]
    walk += [(1472, 576)] + [(height, 512) for height in range(1536, 2049, 64)]
    assert [(height, width) for width, height in canvases(1024, extras=False)] == walk
    assert walk.index((1024, 1024)) == 16
    extras = canvases(1024, extras=True)[33:]
    assert [(height, width) for width, height in extras] == [
        (1024, 768),
        (1280, 720),
        (768, 1024),
        (720, 1280),
    ]


@pytest.mark.parametrize(
    ("asked", "drawn"),
    [
        ((512, 512), (1024, 1024)),
        ((1536, 1536), (1024, 1024)),
        ((1920, 1080), (1280, 720)),
        ((1080, 1920), (720, 1280)),
    ],
)
def test_another_size_is_refused_with_the_canvas_of_the_nearest_shape(asked, drawn):
    said = refused(Request("x", size=asked))
    assert "size={}x{}: ".format(*asked) in said
    assert "The nearest is {}x{}.".format(*drawn) in said


def test_every_canvas_is_drawn_as_it_is():
    for size in FULL.canvases:
        resolved = validate_request(Request("x", size=size), SPEC)
        assert (resolved.width, resolved.height) == resolved.output_size == size


@pytest.mark.parametrize(
    ("ratio", "drawn"),
    [("16:9", (1280, 720)), ("9:16", (720, 1280)), ("4:1", (2048, 512)), ("1:1", (1024, 1024))],
)
def test_a_ratio_takes_the_canvas_nearest_to_it(ratio, drawn):
    resolved = validate_request(Request("x", aspect_ratio=ratio), SPEC)
    assert (resolved.width, resolved.height) == drawn


def test_of_two_equally_near_canvases_the_first_is_taken():
    sizes = replace(SPEC.sizes, canvases=((100, 50), (100, 150)))
    assert sizes.nearest(100, 100) == (100, 50)


# --- schedule and guidance ---


@pytest.mark.parametrize(
    ("steps", "first", "last"),
    [
        (50, [1000, 993.2433, 986.3013, 979.1666], [160.7143, 111.1111, 57.6923]),
        (28, [1000, 987.8048, 974.9999, 961.5385], [264.7059, 187.5, 100]),
        (8, [1000, 954.5454, 900, 833.3333, 750], [642.8571, 500, 300]),
        (4, [1000, 900, 750, 500], [900, 750, 500]),
    ],
)
def test_noise_levels_are_shifted_once(steps, first, last):
    schedule = build(make_spec("hunyuan-image-3", TINY), _float32()).schedule(steps)
    times = [1000 * sigma for sigma in schedule.sigmas[:-1]]
    assert times[: len(first)] == pytest.approx(first, abs=1e-4)
    assert times[-len(last) :] == pytest.approx(last, abs=1e-4)
    assert schedule.sigmas[-1] == 0


def test_guidance_extrapolates_from_the_branch_without_the_prompt():
    velocities = torch.tensor([[3.0], [1.0]])[:, :, None, None]
    assert guided(velocities, 5.0).flatten().tolist() == [11.0]
    assert torch.equal(guided(velocities[:1], 5.0), velocities[:1])


def test_rescaling_brings_guidance_back_to_the_spread_of_the_conditional_branch():
    velocities = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    plain, back = guided(velocities, 5.0), guided(velocities, 5.0, rescale=1.0)
    assert back.std().item() == pytest.approx(velocities[0].std().item(), rel=1e-5)
    half = guided(velocities, 5.0, rescale=0.5)
    assert torch.allclose(half, (plain + back) / 2, rtol=0, atol=1e-5)
    assert torch.equal(guided(velocities, 5.0, rescale=0.0), plain)


def test_a_wish_to_rescale_needs_guidance_to_take_back():
    assert validate_request(Request("x", guidance_rescale=0.7), SPEC).guidance_rescale == 0.7
    for wish, spec in (
        (Request("x", guidance_rescale=0.5, guidance_scale=1.0), SPEC),
        (Request("x", guidance_rescale=0.5), DISTIL),
        (Request("x", guidance_rescale=0.5), read_spec("h3-mini", "builtin")),
    ):
        assert "guidance_rescale=0.5: takes back" in refused(wish, spec)
    for amount in (-0.1, 1.5, float("nan"), True, "1"):
        assert "a number from 0 to 1" in refused(Request("x", guidance_rescale=amount))


@pytest.mark.parametrize(("scale", "branches"), [(None, 1), (0.5, 1), (1.0, 1), (1.5, 2), (5.0, 2)])
def test_a_second_branch_is_drawn_only_for_a_scale_above_one(scale, branches):
    assert SPEC.branches(scale) == branches
    assert DISTIL.branches(scale) == 1


def test_defaults_are_those_of_the_form():
    resolved = validate_request(Request("x"), SPEC)
    assert (resolved.steps, resolved.guidance_scale) == (50, 2.5)
    assert (resolved.width, resolved.height) == (1024, 1024)
    assert validate_request(Request("x"), DISTIL).steps == 8
    assert validate_request(Request("x", steps=7, guidance_scale=5), SPEC).steps == 7


def test_references_are_refused():
    import numpy as np

    said = refused(Request("x", references=(np.zeros((64, 64, 3), np.uint8),)))
    assert "takes none" in said


# --- system prompts ---


def test_a_system_prompt_is_named_or_written_out():
    spec = replace(SPEC, system_prompts={"en_unified": "\nBe good.\n"})
    assert validate_request(Request("x"), spec).system_prompt is None
    assert validate_request(Request("x", use_system_prompt="en_unified"), spec).system_prompt == "Be good."
    assert validate_request(Request("x", system_prompt="  Mine. "), spec).system_prompt == "Mine."
    assert validate_request(Request("x", system_prompt="  "), spec).system_prompt is None
    assert "Did you mean 'en_unified'?" in refused(Request("x", use_system_prompt="en_unifed"), spec)
    assert "both were given" in refused(Request("x", use_system_prompt="en_unified", system_prompt="y"), spec)
    assert "brings none" in refused(Request("x", use_system_prompt="en_unified"))
    assert "takes no system prompt" in refused(
        Request("x", system_prompt="y"), read_spec("h3-mini", "builtin")
    )


# --- layouts and layers ---


@pytest.mark.parametrize(
    ("layout", "devices"),
    [
        (Layout(tensor=2), 2),
        (Layout(tensor=8), 8),
        (Layout(tensor=2, ulysses=2), 4),
        (Layout(tensor=2, guidance=2), 4),
        (Layout(tensor=4, expert=4), 4),
        (Layout(data=2), 2),
    ],
)
def test_published_layouts_are_legal(layout, devices):
    assert not layout_problems(layout, SPEC, devices=devices)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout(tensor=16), "must divide"),
        (Layout(ring=2), "cannot be split this way"),
        (Layout(guidance=3), "two branches"),
        (Layout(tensor=3), "must divide"),
    ],
)
def test_layouts_that_do_not_go_are_refused(layout, said):
    assert said in layout_problems(layout, SPEC, devices=layout.world)[0]


def test_the_distil_form_has_no_branches_to_split():
    assert "cannot be split this way" in layout_problems(Layout(guidance=2), DISTIL, devices=2)[0]


def test_the_tensor_plan_divides_every_layer_along_whole_heads_and_halves():
    model = build(make_spec("hunyuan-image-3", TINY), _float32()).dit
    spec, found = make_spec("hunyuan-image-3", TINY), {}
    groups = {group.pattern: group for group in spec.linears}
    for split in spec.tensor_plan:
        layer = model.get_submodule(split.pattern.replace("*", "0"))
        group = groups[split.pattern]
        assert (layer.in_features, layer.out_features) == (group.in_features, group.out_features)
        assert split.experts == group.experts == getattr(layer, "num_experts", 0)
        assert not split.parts or sum(split.parts) == layer.out_features
        found[split.pattern] = split
    assert found.keys() == groups.keys()
    assert found["layers.*.self_attn.qkv_proj"].parts == (8 * 16, 4 * 16, 4 * 16)


def test_the_router_and_all_that_is_not_a_large_layer_stay_as_they_are():
    names = {name for group in SPEC.linears for name in group.names()}
    assert not [name for name in names if "gate." in name or name.endswith(".gate")]
    assert all(name.startswith("layers.") for name in names)
    eligible = sum(
        group.count * (group.experts or 1) * group.in_features * group.out_features for group in SPEC.linears
    )
    assert eligible == 79_859_548_160


# --- bytes ---


def test_weights_take_the_bytes_of_their_parameters():
    workload = Workload(1024, 1024, 256)
    plain = SPEC.bytes_on_device("dit", workload, Numbers("bfloat16"))
    small = SPEC.bytes_on_device("dit", workload, Numbers("bfloat16", "fp8_row"))
    transformer = 77_309_411_328 + 1_342_185_472 + 1_207_959_552 + 8_388_608 + 262_144
    around = 226_819_072 + 60_081_184 + 3 * 17_833_984
    assert plain.weights == 2 * (transformer + around)
    scales = 32 * 4 * (6144 + 4096 + 65 * (6144 + 4096))
    assert small.weights == plain.weights - 79_859_548_160 + scales
    assert SPEC.bytes_on_device("text_encoder", workload, Numbers("bfloat16")).weights == 2 * 545_259_520


def test_predicted_decoder_weights_are_those_of_the_module():
    spec = make_spec("hunyuan-image-3", TINY)
    module = build(spec, _float32()).vae
    held = sum(4 * parameter.numel() for parameter in module.parameters())
    assert spec.bytes_on_device("vae", Workload(256, 256, 64), Numbers("float32")).weights == held


def test_the_fp8_model_fits_one_h200_and_the_bfloat16_one_does_not():
    machine = load_machine(MACHINES / "h200.json")
    recipe = {"model": "hunyuan-image-3", "weights": "random", "precision": "bfloat16"}
    small = make_plan(Recipe(**recipe, quantization={"dit": "fp8_row"}), SPEC, machine, None)
    assert small.fits
    assert small.bytes.peak < 100e9
    assert small.dtype["vae"] == "float16"
    large = make_plan(Recipe(**recipe), SPEC, machine, None)
    assert not large.fits


def test_the_autoencoder_computes_in_float32_where_float16_is_not_computed():
    setup = set_up(Recipe(model="hunyuan-image-3", weights="random", precision="float32"), strict=False)
    assert setup.plan.dtype == {"text_encoder": "float32", "dit": "float32", "vae": "float32"}


def test_layerwise_offload_of_what_has_no_blocks_is_refused():
    machine = load_machine(MACHINES / "h200.json")
    for name, what in (("text_encoder", "text encoder"), ("vae", "VAE")):
        recipe = Recipe(model="hunyuan-image-3", weights="random", offload={name: "layerwise"})
        with pytest.raises(RecipeError, match=f"offload.{name}=layerwise: the {what} has no blocks"):
            make_plan(recipe, SPEC, machine, None)


# --- configs ---


def written(folder: Path, **changes) -> Path:
    raw = config_json(TINY)
    for key, value in changes.items():
        section = raw["vae"] if key.startswith("vae_") else raw
        section[key.removeprefix("vae_")] = value
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "generation_config.json").write_text(json.dumps(TINY.generation.__dict__))
    return folder


def test_configs_come_back_as_they_were_written(tmp_path):
    config = HunyuanConfig.from_folder(written(tmp_path), system_prompts={})
    assert (config.dit, config.vae, config.generation) == (TINY.dit, TINY.vae, TINY.generation)
    assert config.notes == ()


def test_a_default_that_is_used_is_told(tmp_path):
    written(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"diff_infer_steps": 8}')
    notes = read_spec("hunyuan-image-3", tmp_path).notes
    assert [note.split(";")[0] for note in notes] == [
        f"generation_config.json does not give {name}"
        for name in ("diff_guidance_scale", "flow_shift", "sequence_template")
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"use_cla": True}, "use_cla = True"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False"),
        ({"moe_topk": [2, 2, 3]}, "moe_topk differs between layers"),
        ({"moe_topk": 9}, "moe_topk = 9 of 8 experts"),
        ({"num_key_value_heads": 3}, "3 key heads (num_key_value_heads) must divide 8 query heads"),
        ({"hidden_size": "64"}, "hidden_size = '64'"),
        ({"hidden_size": 0}, "hidden_size = 0"),
        ({"rope_theta": float("nan")}, "rope_theta = nan"),
        ({"cfg_distilled": True}, "go together"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"vae_ffactor_spatial": 12}, "ffactor_spatial = 12"),
        ({"vae_ffactor_spatial": 8}, "ffactor_spatial = 8 has 3 of them"),
        ({"vae_ffactor_spatial": 2}, "ffactor_temporal = 4 must not be above ffactor_spatial = 2"),
        ({"vae_block_out_channels": []}, "block_out_channels"),
        ({"vae_block_out_channels": [8, "8"]}, "block_out_channels"),
        ({"vae": [1]}, "vae = [1] must be a JSON object"),
        ({"image_base_size": 100}, "image_base_size = 100"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_a_config_that_cannot_serve_is_refused(tmp_path, changes, said):
    if "vae" in changes:
        raw = config_json(TINY) | changes
        (tmp_path / "config.json").write_text(json.dumps(raw))
    else:
        written(tmp_path, **changes)
    with pytest.raises(WeightsError, match=re.escape(said)):
        read_spec("hunyuan-image-3", tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{", "\xff"])
def test_a_damaged_config_file_is_told_as_one(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(WeightsError, match=r"config\.json"):
        read_spec("hunyuan-image-3", tmp_path)


def test_keys_that_mean_nothing_here_are_refused_with_the_way_out(tmp_path):
    base = {"model": "hunyuan-image-3", "weights": str(written(tmp_path))}
    with pytest.raises(RecipeError, match=r"checkpoint_dialect: comfy: .* Leave the key out"):
        set_up(Recipe(**base, checkpoint_dialect="comfy"))
    with pytest.raises(RecipeError, match=r"components\.vae: .* Leave the key out"):
        set_up(Recipe(**base, components={"vae": str(tmp_path)}))


def _float32() -> dict[str, torch.dtype]:
    return dict.fromkeys(("text_encoder", "dit", "vae"), torch.float32)
