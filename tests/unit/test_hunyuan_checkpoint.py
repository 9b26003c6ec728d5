"""The tensors of a HunyuanImage-3.0 checkpoint: the real names and shapes, and what is read."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from portable_dit.errors import WeightsError
from portable_dit.loading import load_model
from portable_dit.models.hunyuan_image_3.checkpoint import (
    stack_qkv_rows,
    swap_halves,
    tensor_map,
)
from portable_dit.models.hunyuan_image_3.config import DiTConfig, HunyuanConfig
from portable_dit.models.hunyuan_image_3.dit import HunyuanTransformer
from portable_dit.models.hunyuan_image_3.model import TokenTable
from portable_dit.models.hunyuan_image_3.names import all_tensors, dit_tensors, layer_tensors
from portable_dit.models.hunyuan_image_3.random_checkpoint import plan_random, write_random
from portable_dit.models.hunyuan_image_3.vae import Decoder
from portable_dit.recipe import Recipe
from portable_dit.setup import set_up
from portable_dit.slots import targets_of

FULL = HunyuanConfig()
DISTIL = replace(FULL, dit=replace(DiTConfig(), cfg_distilled=True, use_meanflow=True))


def parameters(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def under(prefix: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if name.startswith(prefix)}


def test_the_checkpoint_has_the_published_count_of_tensors_and_parameters():
    found = all_tensors(FULL)
    assert len(found) == 5161
    assert len(all_tensors(DISTIL)) == 5169
    assert parameters(found) == 83_009_199_459
    assert len(layer_tensors(FULL.dit, "")) == 137
    assert {name: len(under(name, found)) for name in ("vae.decoder.", "vae.encoder.", "vision_")} == {
        "vae.decoder.": 160,
        "vae.encoder.": 120,
        "vision_": 452,
    }


@pytest.mark.parametrize(
    ("prefix", "count"),
    [
        ("model.wte", 545_259_520),
        ("lm_head", 545_259_520),
        ("patch_embed", 226_819_072),
        ("final_layer", 60_081_184),
        ("timestep_emb", 17_833_984),
        ("time_embed.", 17_833_984),
        ("vae.encoder", 389_342_464),
        ("vae.decoder", 871_332_483),
        ("vision_model", 427_888_064),
        ("vision_aligner", 21_504_000),
    ],
)
def test_each_part_has_the_published_count_of_parameters(prefix, count):
    assert parameters(under(prefix, all_tensors(FULL))) == count


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.31.self_attn.qkv_proj.weight", (6144, 4096)),
        ("model.layers.0.mlp.gate.wg.weight", (64, 4096)),
        ("model.layers.7.mlp.experts.63.gate_and_up_proj.weight", (6144, 4096)),
        ("model.layers.7.mlp.shared_mlp.down_proj.weight", (4096, 3072)),
        ("patch_embed.model.1.emb_layers.1.weight", (8192, 4096)),
        ("final_layer.model.0.skip_connection.weight", (1024, 4096, 1, 1)),
        ("vae.decoder.up.0.upsample.conv.weight", (8192, 1024, 3, 3, 3)),
        ("vae.decoder.up.3.upsample.conv.weight", (512, 256, 3, 3, 3)),
        ("vae.encoder.down.0.downsample.conv.weight", (64, 128, 3, 3, 3)),
        ("vae.encoder.down.3.downsample.conv.weight", (128, 1024, 3, 3, 3)),
        ("vision_model.head.attention.in_proj_weight", (3456, 1152)),
    ],
)
def test_shapes_are_the_published_ones(name, shape):
    assert all_tensors(FULL)[name] == shape


@pytest.mark.parametrize("config", [FULL, DISTIL], ids=["instruct", "distil"])
def test_the_modules_take_from_the_real_names_just_what_pictures_need(config):
    """On the meta device, at full size: every parameter has its source, and the rest is left."""
    shapes = all_tensors(config)
    with torch.device("meta"):
        modules = {
            "dit": HunyuanTransformer(config.dit, config.vae.latent_channels, torch.bfloat16),
            "vae": Decoder(config.vae),
            "text_encoder": TokenTable(config, torch.bfloat16),
        }
    used = set()
    for component, module in modules.items():
        found = tensor_map(component, shapes, config)
        targets = targets_of(module)
        assert found.sources.keys() == targets.keys()
        for name, source in found.sources.items():
            stored = [torch.empty(shapes[part], device="meta") for part in source.names]
            assert tuple(source.make(*stored).shape) == targets[name].shape, name
        mine = {part for source in found.sources.values() for part in source.names}
        assert found.unused == shapes.keys() - mine
        assert not used & mine
        used |= mine
    left = {name.split(".")[0] for name in shapes.keys() - used}
    assert left == {"model", "lm_head", "vae", "vision_model", "vision_aligner"}
    assert {name for name in shapes.keys() - used if name.startswith("model.")} == {"model.ln_f.weight"}
    assert all(name.startswith("vae.encoder.") for name in shapes.keys() - used if name.startswith("vae."))


def test_a_dry_run_of_the_full_size_plans_the_published_shards():
    files = plan_random("full", "instruct")
    assert len(files) == 32
    assert files[0].path == "model-0001-of-0032.safetensors"
    assert files[-1].path == "model-0032-of-0032.safetensors"
    assert sum(file.bytes for file in files) / 1e9 == pytest.approx(169.4, abs=0.1)
    assert sum(len(file.tensors) for file in files) == 5161


def test_attention_rows_come_in_groups_of_queries_key_and_value():
    config = replace(FULL.dit, num_attention_heads=4, num_key_value_heads=2, attention_head_dim=2)
    names = [f"{kind}{group}" for group in "ab" for kind in ("q0", "q1", "k", "v")]
    rows = torch.tensor([[place] for place, _ in enumerate(names) for _ in range(2)])
    ordered = [names[int(row)] for row in stack_qkv_rows(rows, config)[::2, 0]]
    assert ordered == ["q0a", "q1a", "q0b", "q1b", "ka", "kb", "va", "vb"]


def test_gated_projections_have_the_plain_half_first():
    rows = torch.arange(6)[:, None]
    assert swap_halves(rows)[:, 0].tolist() == [3, 4, 5, 0, 1, 2]
    shapes = dit_tensors(replace(FULL.dit, num_hidden_layers=1, num_experts=1), 32)
    changed = [
        name
        for name, source in tensor_map("dit", shapes, FULL).sources.items()
        if "up_proj" in name and torch.equal(source.make(rows), swap_halves(rows))
    ]
    assert changed == [
        "layers.0.mlp.shared_mlp.gate_and_up_proj.weight",
        "layers.0.mlp.experts.gate_and_up_proj.0.weight",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dialect", "instruckt"), "Did you mean 'instruct'"),
        (("--config", "tiney"), "Did you mean 'tiny'"),
        (("--model", "hunyuan-image-2"), "Did you mean 'hunyuan-image-3'"),
    ],
)
def test_a_made_up_checkpoint_of_an_unknown_kind_is_refused(cli, tmp_path, words, said):
    refused = cli("weights", "init", "--model", "hunyuan-image-3", "-o", tmp_path / "x", *words)
    assert refused.exit_code == 2
    assert said in refused.stderr
    assert not (tmp_path / "x").exists()


def test_a_made_up_checkpoint_is_whole_and_goes_into_an_empty_folder_only(cli, tmp_path):
    words = "weights", "init", "--model", "hunyuan-image-3", "-o", tmp_path / "x"
    assert cli(*words).exit_code == 0
    assert "all right" in cli("weights", "verify", tmp_path / "x").stdout
    again = cli(*words)
    assert again.exit_code == 2
    assert "there is something already" in again.stderr


def test_a_seed_decides_every_number(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_random(tmp_path / name, config="tiny", dialect="distil", seed=seed)
    bytes_of = {n: (tmp_path / n / "model-0001-of-0008.safetensors").read_bytes() for n in "abc"}
    assert bytes_of["a"] == bytes_of["b"] != bytes_of["c"]


@pytest.mark.parametrize("shape", [(-1,), (1, -1), (2, -1), (-1, 1, 1, 1, 1, 1)])
@pytest.mark.parametrize(
    "name",
    [
        "vae.decoder.up.2.upsample.conv.weight",
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.1.mlp.experts.3.gate_and_up_proj.weight",
    ],
)
def test_a_tensor_with_too_few_or_too_many_dimensions_is_refused_by_name(tmp_path, name, shape):
    write_random(tmp_path, config="tiny", dialect="instruct", seed=0)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    file = tmp_path / index["weight_map"][name]
    stored = load_file(file)
    stored[name] = stored[name].reshape(shape).contiguous()
    save_file(stored, file)
    recipe = Recipe(model="hunyuan-image-3", weights=str(tmp_path), precision="float32")
    with pytest.raises(WeightsError, match=re.escape(name)):
        load_model(set_up(recipe))
