"""LoRA adapters: read, matched with layers in every dialect, added to weights before these are rounded."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from portable_dit.engine import Engine
from portable_dit.errors import RecipeError, WeightsError
from portable_dit.loading import load_model
from portable_dit.lora import add, read_adapter, split_scale
from portable_dit.models.h3_image.dialects import stored_rows as h3_rows
from portable_dit.models.h3_image.dit import H3Transformer
from portable_dit.models.h3_image.random_checkpoint import TINY, write_random
from portable_dit.models.hunyuan_image_3.checkpoint import stored_rows as hunyuan_rows
from portable_dit.models.hunyuan_image_3.random_checkpoint import TINY as TINY_HUNYUAN
from portable_dit.models.hunyuan_image_3.random_checkpoint import write_random as write_hunyuan
from portable_dit.models.spec import StoredRows, TensorSource
from portable_dit.quantize import QuantizedLinear, quantized_weights
from portable_dit.recipe import load_recipe, make_recipe
from portable_dit.request import Request
from portable_dit.safetensors_file import open_tensor_file
from portable_dit.setup import set_up
from portable_dit.shares import Share
from portable_dit.weights import Made

RANK, HIDDEN, HEADS, HEAD, FFN = 4, 64, 4, 32, 128  # of the tiny checkpoints
INNER = HEADS * HEAD
QKV, FC1, OUT = "blocks.1.attn.qkv_proj", "blocks.0.mlp.fc1", "blocks.2.attn.out_proj"
PEFT, KOHYA = ("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight")
Pairs = Mapping[str, tuple[Tensor, Tensor]]  # layer -> down [R, K], up [N, R]


def pair(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(RANK, columns, generator=generator), torch.randn(rows, RANK, generator=generator)


OURS: Pairs = {QKV: pair(3 * INNER, HIDDEN, 1), FC1: pair(2 * FFN, HIDDEN, 2), OUT: pair(HIDDEN, INNER, 3)}


def head_by_head(ours: Pairs) -> Pairs:
    """As the original has fused rows: a head's queries, its keys, its values, then the next head's."""
    down, up = ours[QKV]
    rows = [part[n * HEAD : (n + 1) * HEAD] for n in range(HEADS) for part in up.chunk(3)]
    return {**ours, QKV: (down, torch.cat(rows))}


def apart(ours: Pairs) -> Pairs:
    """As diffusers has them: projections apart, the halves of the gated layer exchanged."""
    down, up = ours[QKV]
    thirds = zip("qkv", up.chunk(3), strict=True)
    gate, value = ours[FC1][1].chunk(2)
    return {
        **{f"transformer_blocks.1.attn.to_{letter}": (down, part) for letter, part in thirds},
        "transformer_blocks.0.ff.net.0.proj": (ours[FC1][0], torch.cat([value, gate])),
        "transformer_blocks.2.attn.to_out.0": ours[OUT],
    }


def underscored(ours: Pairs) -> Pairs:
    return {layer.replace(".", "_"): both for layer, both in ours.items()}


def write(
    path: Path,
    pairs: Pairs,
    *,
    prefix: str = "",
    names: tuple[str, str] = PEFT,
    more: Mapping[str, Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """An adapter file; names: of a layer's two matrices."""
    stored = {
        f"{prefix}{layer}.{name}": matrix.clone()
        for layer, both in pairs.items()
        for name, matrix in zip(names, both, strict=True)
    }
    save_file({**stored, **(more or {})}, path, metadata)
    return path


def weights_of(checkpoint: Path, model: str = "h3-image", **keys: object) -> dict[str, Tensor]:
    return dict(dit_of(checkpoint, model, **keys).state_dict())


def dit_of(checkpoint: Path, model: str = "h3-image", **keys: object) -> nn.Module:
    wish = {"model": model, "weights": str(checkpoint), "precision": "float32", **keys}
    if (checkpoint / "diffusion_models" / "minimax_h3_image_bf16.safetensors").exists():
        wish["checkpoint_dialect"] = "comfy"  # its names do not say
    return load_model(set_up(make_recipe(wish))).model.component("dit")


def assert_added(changed: Mapping[str, Tensor], plain: Mapping[str, Tensor], added: Mapping[str, Tensor]):
    """added: what each changed weight has more than the plain one, in float64; the others are untouched."""
    for name, weight in plain.items():
        if name in added:
            assert torch.allclose(changed[name].double(), weight.double() + added[name], rtol=0, atol=1e-5), (
                name
            )
        else:
            assert torch.equal(changed[name], weight), name


def products(ours: Pairs, scale: float = 1.0) -> dict[str, Tensor]:
    return {f"{n}.weight": scale * up.double() @ down.double() for n, (down, up) in ours.items()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """The same numbers in every dialect."""
    found = {}
    for dialect in ("original", "diffusers", "comfy", "int8-convrot", "fp8"):
        found[dialect] = tmp_path_factory.mktemp(dialect)
        write_random(found[dialect], config="tiny", dialect=dialect, seed=0)
    return found


# What writes an adapter, how it has the rows, and what it puts before and behind a layer's name.
TRAINERS = {
    "PEFT on the original": (head_by_head, "base_model.model.", PEFT),
    "PEFT through diffusers": (apart, "transformer.", PEFT),
    "diffusers of old": (apart, "transformer.", ("lora.down.weight", "lora.up.weight")),
    "with the adapter's name": (apart, "", ("lora_A.default.weight", "lora_B.default.weight")),
    "for ComfyUI": (dict, "diffusion_model.", PEFT),
    "underscores and down and up": (lambda ours: underscored(dict(ours)), "lora_unet_", KOHYA),
    "underscores of diffusers' names": (lambda ours: underscored(apart(ours)), "lora_transformer_", KOHYA),
    "without an end": (head_by_head, "", ("lora_down", "lora_up")),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_adapter_of_any_trainer_is_added_to_the_same_weights(checkpoints, trainer, tmp_path):
    rows, prefix, names = TRAINERS[trainer]
    path = write(tmp_path / "style.safetensors", rows(OURS), prefix=prefix, names=names)
    changed = weights_of(checkpoints["original"], lora=[f"{path}:0.5"])
    assert_added(changed, weights_of(checkpoints["original"]), products(OURS, 0.5))


@pytest.mark.parametrize("base", ["diffusers", "comfy", "int8-convrot"])
@pytest.mark.parametrize("trainer", ["PEFT through diffusers", "for ComfyUI"])
def test_an_adapter_of_one_dialect_fits_a_checkpoint_of_another(checkpoints, base, trainer, tmp_path):
    rows, prefix, names = TRAINERS[trainer]
    path = write(tmp_path / "style.safetensors", rows(OURS), prefix=prefix, names=names)
    changed = weights_of(checkpoints[base], lora=[f"{path}:-2"])
    assert_added(changed, weights_of(checkpoints[base]), products(OURS, -2))


@pytest.mark.parametrize(
    ("base", "rows"),
    [("comfy", dict), ("int8-convrot", dict), ("diffusers", head_by_head), ("fp8", head_by_head)],
)
def test_fused_rows_without_a_sign_of_their_dialect_are_the_checkpoints_or_else_the_originals(
    checkpoints, base, rows, tmp_path
):
    """Of the last two no name is the original's; the last keeps modulation as a curve, as ComfyUI does."""
    path = write(tmp_path / "style.safetensors", rows(OURS))
    changed = weights_of(checkpoints[base], lora=[str(path)])
    assert_added(changed, weights_of(checkpoints[base]), products(OURS))


def test_one_projection_of_three_leaves_the_others(checkpoints, tmp_path):
    down, up = pair(INNER, HIDDEN)
    path = write(tmp_path / "style.safetensors", {"transformer_blocks.1.attn.to_k": (down, up)})
    added = torch.zeros(3 * INNER, HIDDEN, dtype=torch.float64)
    added[INNER : 2 * INNER] = up.double() @ down.double()
    changed = weights_of(checkpoints["comfy"], lora=[str(path)])
    assert_added(changed, weights_of(checkpoints["comfy"]), {f"{QKV}.weight": added})


def test_several_adapters_add_up(checkpoints, tmp_path):
    one, two = write(tmp_path / "1.safetensors", OURS), write(tmp_path / "2.safetensors", {OUT: OURS[OUT]})
    changed = weights_of(checkpoints["comfy"], lora=[f"{one}:0.5", f"{two}:0.25"])
    added = products(OURS, 0.5)
    added[f"{OUT}.weight"] *= 1.5
    assert_added(changed, weights_of(checkpoints["comfy"]), added)


def test_experts_and_key_groups_of_a_mixture_are_changed(tmp_path):
    write_hunyuan(tmp_path / "model", config="tiny", dialect="instruct", seed=0)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    kinds = (
        "self_attn.qkv_proj",
        "mlp.experts.3.gate_and_up_proj",
        "mlp.shared_mlp.down_proj",
        "mlp.gate.wg",
    )
    pairs = {}
    for kind in kinds:
        layer = f"model.layers.1.{kind}"
        file = tmp_path / "model" / index[f"{layer}.weight"]
        stored = load_file(file)
        weight = stored[f"{layer}.weight"]
        down, up = pair(*weight.shape)
        pairs[layer] = (0.01 * down).bfloat16(), up.bfloat16()
    path = write(tmp_path / "style.safetensors", pairs, prefix="base_model.model.")
    keys = {"model": "hunyuan-image-3", "lora": [str(path)]}
    before, found = weights_of(tmp_path / "model", "hunyuan-image-3"), weights_of(tmp_path / "model", **keys)
    for layer, (down, up) in pairs.items():  # what the adapter says, put into the files themselves
        file = tmp_path / "model" / index[f"{layer}.weight"]
        stored = load_file(file)
        stored[f"{layer}.weight"] = stored[f"{layer}.weight"].float() + up.float() @ down.float()
        save_file(stored, file)
    wanted = weights_of(tmp_path / "model", "hunyuan-image-3")
    assert sum(not torch.equal(before[name], wanted[name]) for name in wanted) == len(kinds)
    for name, weight in wanted.items():
        assert torch.allclose(found[name], weight, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("form", ["fp8_row", "int8_row_rotated"])
def test_what_is_encoded_is_the_changed_weight(checkpoints, form, tmp_path):
    path = write(tmp_path / "style.safetensors", OURS, prefix="diffusion_model.")
    layers = quantized_weights(dit_of(checkpoints["comfy"], quantization={"dit": form}, lora=[str(path)]))
    changed = weights_of(checkpoints["comfy"], lora=[str(path)])
    for layer in OURS:
        held, weight = layers[f"{layer}.weight"][0], changed[f"{layer}.weight"]
        wanted = QuantizedLinear(nn.Linear(*weight.shape[::-1], bias=False), held.kernel)
        wanted.accept_weight(weight)
        for name in wanted.packed_names:
            assert torch.equal(getattr(held, name), getattr(wanted, name))


def test_a_weight_that_is_stored_in_the_format_that_runs_is_encoded_anew(tiny_recipe, tmp_path):
    """Else the adapter would be dropped without a word."""
    down, up = pair(64, 64)
    path = write(tmp_path / "style.safetensors", {"blocks.0.attn.out_proj": (down, up)})
    keys = {"quantization.dit": "int8_row"}
    with (
        Engine.load(tiny_recipe, keys) as plain,
        Engine.load(tiny_recipe, {**keys, "lora": [str(path)]}) as other,
    ):
        pictures = [engine.generate(Request("a red apple")).images[0].pixels for engine in (plain, other)]
    assert (pictures[0] != pictures[1]).any()


def test_a_rank_adds_its_own_share(tmp_path, monkeypatch):
    monkeypatch.setattr("portable_dit.lora.ROWS_AT_ONCE", 7)
    rows, columns = 24, 12
    save_file({"a": torch.zeros(rows, columns)}, tmp_path / "model.safetensors")
    down, up = pair(rows, columns)
    adapter = read_adapter(write(tmp_path / "style.safetensors", {"a": (down, up)}), 1.0)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    change = add([adapter], {"own": {"a": StoredRows("ours", order)}}, {"ours": (rows, columns)}).changes[
        "ours"
    ]
    whole = torch.zeros(rows, columns)
    whole[order] = up @ down
    stored = open_tensor_file(tmp_path / "model.safetensors").tensors
    for by_rows in (True, False):
        source = TensorSource(("a",), lambda tensor: tensor, by_rows=by_rows)
        for dim, ranges in ((0, ((0, 4), (12, 16))), (1, ((3, 9),))):
            share = Share(dim, whole.shape[dim], ranges)
            wanted = share.cut(whole)
            found = Made("ours", stored, source, share, change).read(tuple(wanted.shape))
            assert torch.allclose(found, wanted, atol=1e-6)


def test_a_cache_keeps_weights_with_and_without_an_adapter_apart(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setenv("PORTABLE_DIT_CACHE", str(tmp_path / "cache"))
    paths = [write(tmp_path / f"{n}.safetensors", {OUT: pair(HIDDEN, INNER, n)}) for n in (1, 2)]
    keys = {"cache": True, "quantization": {"dit": "int8_row"}}
    wishes = [(), (f"{paths[0]}",), (f"{paths[0]}:0.5",), (f"{paths[1]}",)]
    found = {}
    for again in range(2):
        for lora in wishes:
            layer = quantized_weights(dit_of(checkpoints["comfy"], lora=lora, **keys))[f"{OUT}.weight"][0]
            entries = len(list((tmp_path / "cache").glob("*.safetensors")))
            assert entries == (len(wishes) if again else len(found) + 1)
            held = [getattr(layer, name).clone() for name in layer.packed_names]
            before = found.setdefault(lora, held)
            assert all(torch.equal(one, other) for one, other in zip(held, before, strict=True))
    assert len({str([t.sum().item() for t in held]) for held in found.values()}) == len(wishes)


@pytest.mark.parametrize(
    ("words", "place", "scale"),
    [
        ("style.safetensors", "style.safetensors", 1.0),
        ("style.safetensors:0.8", "style.safetensors", 0.8),
        ("ORG/NAME@main:inside:-1e-1", "ORG/NAME@main:inside", -0.1),
        ("ORG/NAME:inside", "ORG/NAME:inside", 1.0),
        (r"C:\styles\one.safetensors", r"C:\styles\one.safetensors", 1.0),
        ("a:0", "a", 0.0),
    ],
)
def test_a_scale_stands_behind_the_last_colon(words, place, scale):
    assert split_scale(words) == (place, scale)


@pytest.mark.parametrize("words", [":0.5", "a:inf", "a:nan"])
def test_a_scale_without_a_file_or_that_is_no_number_is_refused(words):
    with pytest.raises(WeightsError, match=r"as in style\.safetensors:0\.8"):
        split_scale(words)


def test_alpha_is_taken_from_where_trainers_write_it(tmp_path):
    layer, one = "blocks.0.attn.out_proj", {"blocks.0.attn.out_proj": pair(8, 8)}

    def scale_of(**more) -> float:
        return read_adapter(write(tmp_path / "style.safetensors", one, **more), 0.5).layers[layer].scale

    assert scale_of() == 0.5
    assert scale_of(more={f"{layer}.alpha": torch.tensor(8.0)}) == 1.0
    assert scale_of(metadata={"lora_alpha": "2"}) == 0.25
    assert scale_of(metadata={"ss_network_alpha": "12"}) == 1.5
    pipeline = {"transformer.lora_alpha": 8, "transformer.use_rslora": True}
    assert scale_of(metadata={"lora_adapter_metadata": json.dumps(pipeline)}) == 2.0
    folder = tmp_path / "trained"
    folder.mkdir()
    write(folder / "adapter_model.safetensors", one)
    (folder / "adapter_config.json").write_text(
        json.dumps({"lora_alpha": 4, "alpha_pattern": {"out_proj": 16}})
    )
    assert read_adapter(folder, 1.0).layers[layer].scale == 4.0


def test_a_config_belongs_to_the_only_file_and_to_none_of_several(tmp_path):
    one = {"a": pair(8, 8)}
    path = write(tmp_path / "renamed.safetensors", one)
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 8}')
    assert read_adapter(path, 1.0).layers["a"].scale == 2.0
    assert read_adapter(tmp_path, 1.0).layers["a"].scale == 2.0
    write(tmp_path / "adapter_model.safetensors", one)
    assert read_adapter(tmp_path, 1.0).layers["a"].scale == 2.0
    assert read_adapter(path, 1.0).layers["a"].scale == 1.0


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that opens and cannot be read")
def test_a_config_that_cannot_be_read_is_told_of(tmp_path):
    write(tmp_path / "adapter_model.safetensors", OURS)
    (tmp_path / "adapter_config.json").symlink_to("/proc/self/mem")
    with pytest.raises(WeightsError, match=r"adapter_config\.json: cannot be read"):
        read_adapter(tmp_path, 1.0)


BAD = {
    "one of the two matrices is missing": {"a.lora_A.weight": torch.ones(2, 4)},
    "no lora_A and lora_B": {},
    "DoRA": {"a.lora_magnitude_vector": torch.ones(4)},
    "LoHa": {"a.hada_w1_a": torch.ones(2, 2)},
    "LoKr": {"a.lokr_w1": torch.ones(2, 2)},
    "changes of a bias": {"a.lora_B.bias": torch.ones(4)},
    "no part of a LoRA": {"a.weight": torch.ones(2, 2)},
    "where [R, K] and [N, R] are needed": {
        "a.lora_A.weight": torch.ones(2, 4),
        "a.lora_B.weight": torch.ones(4, 3),
    },
    "NaN or infinite values": {
        "a.lora_A.weight": torch.full((2, 4), torch.nan),
        "a.lora_B.weight": torch.ones(4, 2),
    },
    "I8 and F32": {
        "a.lora_A.weight": torch.ones(2, 4, dtype=torch.int8),
        "a.lora_B.weight": torch.ones(4, 2),
    },
    "no matrices of these layers": {
        "a.lora_A.weight": torch.ones(2, 4),
        "a.lora_B.weight": torch.ones(4, 2),
        "b.alpha": torch.tensor(4.0),
    },
    "do not all begin alike": {
        "transformer.a.lora_A.weight": torch.ones(2, 4),
        "transformer.a.lora_B.weight": torch.ones(4, 2),
        "a.lora_A.weight": torch.ones(2, 4),
        "a.lora_B.weight": torch.ones(4, 2),
    },
    "where [R, K] and [N, R] are needed: rank 0": {
        "a.lora_A.weight": torch.ones(0, 4),
        "a.lora_B.weight": torch.ones(4, 0),
    },
    "the text encoder": {
        "lora_te_a.lora_down.weight": torch.ones(2, 4),
        "lora_te_a.lora_up.weight": torch.ones(4, 2),
    },
}


@pytest.mark.parametrize("reason", BAD)
def test_what_is_no_lora_is_refused_with_what_it_is(reason, tmp_path):
    save_file(BAD[reason], tmp_path / "style.safetensors")
    with pytest.raises(WeightsError, match=re.escape(reason.partition(": ")[0])):
        read_adapter(tmp_path / "style.safetensors", 1.0)


def test_a_layer_that_is_there_twice_is_refused(tmp_path):
    twice = {"a.lora_down.weight": torch.ones(RANK, 4)}
    path = write(tmp_path / "style.safetensors", {"a": pair(4, 4)}, more=twice)
    with pytest.raises(WeightsError, match=r"(?s)no part of a LoRA.*a\.lora_"):
        read_adapter(path, 1.0)


@pytest.mark.parametrize("alpha", [torch.ones(3), torch.tensor(torch.inf), torch.ones(0)])
def test_an_alpha_that_is_no_finite_number_is_refused(alpha, tmp_path):
    path = write(tmp_path / "style.safetensors", {"a": pair(4, 4)}, more={"a.alpha": alpha})
    with pytest.raises(WeightsError, match=r"alpha (or rank )?of a"):
        read_adapter(path, 1.0)


NONSENSE = (
    "{",
    "[]",
    "[" * 100_000,
    json.dumps({"lora_alpha": "much"}),
    json.dumps({"lora_alpha": [1]}),
    json.dumps({"alpha_pattern": [1]}),
    json.dumps({"alpha_pattern": {"(": 1}}),
    json.dumps({"alpha_pattern": {".*": None}}),
    json.dumps({"transformer.use_dora": True}),
    '{"lora_alpha": NaN}',
    '{"r": 8}',
    '{"r": 1e999}',
    '{"r": 4, "rank_pattern": {"qkv_proj": 2}}',
)


@pytest.mark.parametrize("config", NONSENSE, ids=range(len(NONSENSE)))
def test_a_config_that_says_nothing_sensible_is_refused(config, tmp_path):
    path = write(tmp_path / "style.safetensors", OURS, metadata={"lora_adapter_metadata": config})
    with pytest.raises(WeightsError, match=r"JSON|alpha|rank|DoRA"):
        read_adapter(path, 1.0)


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "ADALORA"},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"fan_in_fan_out": True},
        {"modules_to_save": ["head"]},
        {"layer_replication": [[0, 4], [2, 5]]},
        {"alora_invocation_tokens": [1, 2]},
        {"use_qalora": True},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "OLoRA"},
        {"transformer.init_lora_weights": "loftq"},
    ],
    ids=str,
)
def test_a_config_that_says_more_than_two_matrices_is_refused_by_its_key(config, tmp_path):
    path = write(tmp_path / "style.safetensors", OURS, metadata={"lora_adapter_metadata": json.dumps(config)})
    ((key, _),) = config.items()
    with pytest.raises(
        WeightsError, match=f"only plain LoRA is read.*\n  {key.removeprefix('transformer.')}"
    ):
        read_adapter(path, 1.0)


def test_two_names_of_one_layer_are_refused(tiny_recipe, tmp_path):
    both = {name: pair(64, 64) for name in ("blocks.0.attn.out_proj", "blocks_0_attn_out_proj")}
    path = write(tmp_path / "style.safetensors", both)
    with pytest.raises(WeightsError, match=r"two names of one.*\n  blocks_0_attn_out_proj and blocks\.0\."):
        Engine.load(tiny_recipe, {"lora": [str(path)]})


@pytest.mark.parametrize(
    ("keys", "scale", "words"),
    [
        ({}, "-1e6", "to blocks.0.attn.out_proj.weight, whose values"),
        ({}, "1e38", "it adds up to inf to blocks.0.attn.out_proj.weight, whose values"),
        ({"quantization.dit": "int8_row"}, "1e38", "it adds up to inf to blocks.0.attn.out_proj.weight"),
        ({}, "1e308", "a scale of 1e+308 is beyond float32"),
    ],
)
def test_a_scale_that_leaves_nothing_of_a_weight_is_refused(tiny_recipe, keys, scale, words, tmp_path):
    path = write(tmp_path / "style.safetensors", {"blocks.0.attn.out_proj": pair(64, 64)})
    with pytest.raises(WeightsError, match=rf"lora: .*style\.safetensors: .*{re.escape(words)}"):
        Engine.load(tiny_recipe, {**keys, "lora": [f"{path}:{scale}"]})


def test_adapters_that_differ_anywhere_have_entries_of_their_own_in_a_cache(tmp_path):
    path, seen = tmp_path / "style.safetensors", set()
    for value in (0.0, 1.0):
        up = torch.zeros(64, 64)
        up[0, 0] = value
        write(path, {"a": (torch.ones(64, 64), up)})
        os.utime(path, ns=(0, 0))
        seen.add(read_adapter(path, 1.0).identity)
    assert len(seen) == 2
    copy = shutil.copy(path, tmp_path / "copy.safetensors")
    assert read_adapter(Path(copy), 1.0).identity in seen


def test_no_two_layers_have_one_name_with_underscores_for_dots():
    with torch.device("meta"):
        module = H3Transformer(TINY.dit)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    tables = [*h3_rows(shapes, TINY.dit).values(), hunyuan_rows(TINY_HUNYUAN)]
    for table in tables:
        assert len({name.replace(".", "_") for name in table}) == len(table) > 10
    assert len(tables) == 4


def test_a_folder_with_several_files_is_asked_which(tmp_path):
    for name in ("1.safetensors", "2.safetensors"):
        write(tmp_path / name, OURS)
    with pytest.raises(WeightsError, match=r"1\.safetensors, 2\.safetensors.*Name the file"):
        read_adapter(tmp_path, 1.0)


@pytest.mark.parametrize(
    ("layer", "shape", "words"),
    [
        ("blocks.77.attn.out_proj", (64, 64), "made for another model"),
        ("final_layer.heads", (64, 64), "not plain matrices"),
        ("final_layer.video_out", (32, 64), "not plain matrices"),
        ("blocks.0.attn.out_proj", (32, 64), r"it changes \[32, 64\], and the layer is \[64, 64\]"),
    ],
)
def test_an_adapter_for_something_else_is_refused_before_weights_are_read(
    tiny_recipe, layer, shape, words, tmp_path
):
    path = write(tmp_path / "style.safetensors", {layer: pair(*shape)})
    started = []
    with pytest.raises(WeightsError, match=f"(?s){words}.*{layer}|{layer}.*{words}"):
        Engine.load(tiny_recipe, {"lora": [str(path)]}, on_component=started.append)
    assert started == []


@pytest.mark.parametrize("name", ["nowhere.safetensors", "~nobody-of-this-name/style.safetensors"])
def test_a_file_that_is_not_there_is_refused_by_the_plan(tiny_recipe, name):
    with pytest.raises(RecipeError, match=f"lora: {name}: there is no such folder or file. Say a fol"):
        set_up(load_recipe(tiny_recipe, {"lora": [f"{name}:0.5"]}))


def test_the_command_line_takes_several_and_refuses_what_is_none(tiny_recipe, tmp_path, cli):
    path = write(tmp_path / "style.safetensors", {"blocks.0.attn.out_proj": pair(64, 64)})
    (tmp_path / "none.safetensors").write_bytes(b"no header")
    planned = cli("plan", "--recipe", tiny_recipe, "--lora", f"{path}:0.5", "--lora", path, "--json")
    assert json.loads(planned.stdout)["recipe"]["lora"] == {
        "value": [f"{path}:0.5", str(path)],
        "from": "flag",
    }
    refused = cli("plan", "--recipe", tiny_recipe, "--lora", tmp_path / "none.safetensors:2")
    assert refused.exit_code == 2
    assert "not a safetensors file" in refused.stderr


def test_random_weights_take_none(tmp_path):
    path = write(tmp_path / "style.safetensors", OURS)
    with pytest.raises(RecipeError, match="nothing to change"):
        set_up(make_recipe({"model": "h3-image", "weights": "random", "lora": [str(path)]}))


def test_a_recipe_without_adapters_has_the_digest_that_it_had_and_one_with_has_another(tmp_path):
    plain = make_recipe({"model": "h3-mini"})
    assert plain.digest == make_recipe({"model": "h3-mini", "lora": []}).digest
    assert plain.digest != make_recipe({"model": "h3-mini", "lora": ["a.safetensors"]}).digest


def test_the_plan_says_what_is_added(tiny_recipe, tmp_path):
    path = write(tmp_path / "style.safetensors", {"blocks.0.attn.out_proj": pair(64, 64)})
    folder = tmp_path / "trained"
    folder.mkdir()
    write(folder / "adapter_model.safetensors", {"blocks.0.attn.out_proj": pair(64, 64)})
    places = {f"{path}:0.5": "style.safetensors:0.5", f"{folder}/:2": "trained:2", f"{folder}//": "trained"}
    notes = set_up(load_recipe(tiny_recipe, {"lora": list(places)}), strict=True).notes
    for name in places.values():
        assert f"lora {name}: added to the DiT's weights while they are loaded" in notes
    assert not any(str(tmp_path) in note for note in notes)


def test_layers_that_are_stored_in_8_bits_are_told_of(checkpoints, tmp_path, caplog):
    path = write(tmp_path / "style.safetensors", OURS, prefix="diffusion_model.")
    with caplog.at_level("INFO", logger="portable_dit"):
        weights_of(checkpoints["int8-convrot"], lora=[str(path)])
    assert "3 of 3 changed weights are stored in 8 bits or fewer" in caplog.text
    assert "3 layers, rank 4" in caplog.text


def test_a_scale_of_zero_draws_the_picture_without(tiny_recipe, tmp_path):
    path = write(tmp_path / "style.safetensors", {"blocks.0.attn.out_proj": pair(64, 64)})
    pictures = []
    for lora in ([], [f"{path}:0"], [str(path)]):
        with Engine.load(tiny_recipe, {"lora": lora}) as engine:
            pictures.append(engine.generate(Request("a red apple")).images[0].pixels)
    assert (pictures[0] == pictures[1]).all()
    assert (pictures[0] != pictures[2]).any()
