"""One seed, seven layouts: every published form of the model loads to the same parameters."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from portable_dit.errors import RecipeError, WeightsError
from portable_dit.models.h3_image.checkpoint import tensor_map
from portable_dit.models.h3_image.config import H3Config
from portable_dit.models.h3_image.dialects import DIALECTS
from portable_dit.models.h3_image.dit import H3Transformer
from portable_dit.models.h3_image.model import build
from portable_dit.models.h3_image.places import hub_files, read_checkpoint
from portable_dit.models.h3_image.random_checkpoint import FULL, plan_random, write_random
from portable_dit.models.spec import COMPONENTS
from portable_dit.safetensors_file import stored_tensors
from portable_dit.weights import load_component, marker_texts

SEED = 3
QUANTIZED = ("int8-convrot", "fp8", "w4a8")
# What a dialect cannot say by itself.
ASKED = {"comfy": "comfy"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dialects")
    for dialect in DIALECTS:
        write_random(folder / dialect, config="tiny", dialect=dialect, seed=SEED)
    return folder


def load(config: H3Config, component: str) -> dict[str, Tensor]:
    """The parameters of a component in float32, through the package's own loader."""
    module = build(config, dict.fromkeys(COMPONENTS, torch.float32)).component(component)
    stored = stored_tensors(config.places[component])
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    plan = tensor_map(component, shapes, config, texts=marker_texts(stored))
    load_component(module, stored, sources=plan.sources, unused=plan.unused, device=lambda name: "cpu")
    return dict(module.state_dict())


@cache
def loaded(folder: Path, dialect: str, component: str) -> dict[str, Tensor]:
    return load(read_checkpoint(folder / dialect, dialect=ASKED.get(dialect, "auto")), component)


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("dialect", [name for name in DIALECTS if name != "original"])
def test_every_dialect_of_one_seed_loads_to_the_same_numbers(checkpoints, dialect, component):
    expected = loaded(checkpoints, "original", component)
    found = loaded(checkpoints, dialect, component)
    if not DIALECTS[dialect].curve:
        assert found.keys() == expected.keys()
    for name in found.keys() & expected.keys():
        if ".adaln_proj." in name and DIALECTS[dialect].curve:
            continue  # made from a table over time here, from a time MLP there
        quantized = dialect in QUANTIZED and name.startswith("blocks.") and expected[name].ndim == 2
        if quantized:
            error = (found[name] - expected[name]).norm() / expected[name].norm()
            assert 1e-4 < error < {"int8-convrot": 0.01, "fp8": 0.04, "w4a8": 0.12}[dialect], name
        else:
            assert torch.equal(found[name], expected[name]), name


def test_curve_files_agree_among_themselves(checkpoints):
    expected = loaded(checkpoints, "comfy-curve", "dit")
    for dialect in QUANTIZED:
        found = loaded(checkpoints, dialect, "dit")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], t) for name, t in expected.items() if "adaln" in name)


def test_the_same_seed_writes_the_same_bytes_and_another_seed_others(checkpoints, tmp_path):
    for name, seed in (("again", SEED), ("other", SEED + 1)):
        write_random(tmp_path / name, config="tiny", dialect="original", seed=seed)
    files = sorted(p.relative_to(tmp_path / "again") for p in (tmp_path / "again").rglob("*") if p.is_file())
    first = checkpoints / "original"
    assert all((first / f).read_bytes() == (tmp_path / "again" / f).read_bytes() for f in files)
    weights = [f for f in files if f.suffix == ".safetensors"]
    assert len(weights) > 3
    assert all((first / f).read_bytes() != (tmp_path / "other" / f).read_bytes() for f in weights)


def test_an_occupied_folder_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(WeightsError, match="something already"):
        write_random(tmp_path, config="tiny", dialect="original", seed=0)


def test_a_plan_is_what_the_files_hold(checkpoints):
    for dialect in DIALECTS:
        for file in plan_random("tiny", dialect):
            stored = stored_tensors(checkpoints / dialect / file.path)
            assert {n: (t.dtype, t.shape) for n, t in stored.items()} == dict(file.tensors)
            assert sum(t.nbytes for t in stored.values()) == file.bytes


def bytes_in(dialect: str, folder: str) -> int:
    return sum(file.bytes for file in plan_random("full", dialect) if file.path.startswith(f"{folder}/"))


def test_the_full_size_has_the_published_files_and_bytes():
    files = plan_random("full", "original")
    shards = [sum(f.path.startswith(folder) for f in files) for folder in ("transformer", "text_enc", "vae")]
    assert shards == [13, 14, 1]
    assert bytes_in("original", "transformer") == 66_291_420_800  # 33,105,770,752 bfloat16, the rest float32
    assert bytes_in("original", "text_encoder") == 66_714_780_128
    assert bytes_in("original", "vae") == 4 * 584_229_432
    assert round(sum(file.bytes for file in files) / 1e9, 2) == 135.34
    assert bytes_in("diffusers", "transformer_diffusers") == 66_291_420_800
    text = [name for file in files if file.path.startswith("text_encoder") for name in file.tensors]
    assert len(text) == 1058
    kinds = {"BF16": 0, "F32": 0}
    for file in files:
        for dtype, shape in file.tensors.values():
            kinds[dtype] += torch.Size(shape).numel()
    assert kinds == {"BF16": 66_463_160_816, "F32": 604_199_256}  # published as 66.46 B and 604.20 M


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_full_size_of_every_dialect_fits_the_full_model(dialect):
    config = DIALECTS[dialect].dit_config(FULL.dit)
    config = replace(config, qkv_rows="interleaved" if dialect == "original" else "stacked")
    with torch.device("meta"):
        targets = H3Transformer(config, torch.bfloat16).state_dict()
    laid = {}
    for file in plan_random("full", dialect):
        if not file.path.startswith(("vae", "text")):
            for unit in file.units:
                laid |= unit.on_meta()
    shapes = {name: tuple(tensor.shape) for name, tensor in laid.items()}
    texts = {n: bytes(t.tolist()) for n, t in laid.items() if n.endswith(".comfy_quant")}
    plan = tensor_map("dit", shapes, replace(FULL, dit=config), texts=texts)
    assert plan.sources.keys() == targets.keys()
    for name, source in plan.sources.items():
        # Whether a bank of heads holds offsets is read off its values.
        device = "cpu" if name.startswith("final_layer.heads.") else "meta"
        made = source.make(*(torch.empty_like(laid[part], device=device) for part in source.names))
        assert made.shape == targets[name].shape, name


def test_the_repacked_forms_have_about_their_published_sizes():
    sizes = {d: bytes_in(d, "diffusion_models") / 1e9 for d in ("int8-convrot", "w4a8")}
    assert sizes == {"int8-convrot": pytest.approx(21, rel=0.01), "w4a8": pytest.approx(12.55, rel=0.01)}
    curve = {
        name: shape
        for file in plan_random("full", "comfy-curve")
        for name, (dtype, shape) in file.tensors.items()
        if dtype == "F32" and "adaln" in name
    }
    assert sum(4 * torch.Size(shape).numel() for shape in curve.values()) == 174_602_272


def test_a_file_that_may_be_in_two_row_orders_is_not_guessed(checkpoints):
    folder = checkpoints / "comfy"
    with pytest.raises(RecipeError, match=r"checkpoint_dialect: original or checkpoint_dialect: comfy"):
        read_checkpoint(folder)
    (file,) = (folder / "diffusion_models").iterdir()
    assert read_checkpoint(file, dialect="comfy").places["dit"] == file
    right, wrong = (load(read_checkpoint(folder, dialect=d), "dit") for d in ("comfy", "original"))
    name = "blocks.0.attn.qkv_proj.weight"
    assert not torch.equal(right[name], wrong[name])


@pytest.mark.parametrize(
    ("dialect", "asked"),
    [("original", "diffusers"), ("diffusers", "original"), ("comfy-curve", "original"), ("fp8", "comfy")],
)
def test_a_dialect_that_the_names_contradict_is_refused(checkpoints, dialect, asked):
    with pytest.raises(RecipeError, match=f"checkpoint_dialect: {asked}: the names in"):
        read_checkpoint(checkpoints / dialect, dialect=asked)


def test_sizes_are_read_off_a_single_file(checkpoints):
    expected = read_checkpoint(checkpoints / "original").dit
    for dialect in ("comfy-curve", "int8-convrot", "fp8", "w4a8"):
        found = read_checkpoint(checkpoints / dialect).dit
        for field in ("hidden_size", "num_layers", "token_refiner_num_layers", "num_attention_heads"):
            assert getattr(found, field) == getattr(expected, field)
        assert (found.adaln_form, found.curve_grid, found.curve_dim) == ("curve", 1025, 8)
        assert found.rope_inv_freq_len == expected.rope_inv_freq_len


def test_a_plan_says_that_stored_numbers_are_expanded(checkpoints):
    notes = "\n".join(read_checkpoint(checkpoints / "int8-convrot").notes)
    assert "16 layers are stored in int8 in a rotated basis; loading expands them exactly" in notes
    assert "quantization.dit=int8_row_rotated keeps them" in notes
    notes = "\n".join(read_checkpoint(checkpoints / "fp8").notes)
    assert "24 layers are stored in fp8" in notes
    assert "quantization.dit=fp8_row keeps them" in notes
    assert "4 fixed input scales are not used" in notes


@pytest.mark.parametrize("folder", ["transformer", "text_encoder"])
def test_a_form_that_is_not_read_is_refused_before_loading_wherever_it_is(checkpoints, tmp_path, folder):
    shutil.copytree(checkpoints / "original", tmp_path / "copy")
    marker = {"layers.0.fc.comfy_quant": torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)}
    for index in (tmp_path / "copy" / folder).glob("*.index.json"):
        index.unlink()
    save_file(marker, tmp_path / "copy" / folder / "marked.safetensors")
    with pytest.raises(WeightsError, match=r"layers\.0\.fc\.comfy_quant: format 'nvfp4' is not read"):
        read_checkpoint(tmp_path / "copy")


def test_a_plan_says_that_stored_numbers_of_the_text_encoder_are_expanded(checkpoints, tmp_path):
    shutil.copytree(checkpoints / "original", tmp_path / "copy")
    text = b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}'
    for index in (tmp_path / "copy" / "text_encoder").glob("*.index.json"):
        index.unlink()
    marker = {"layers.0.fc.comfy_quant": torch.tensor(list(text), dtype=torch.uint8)}
    save_file(marker, tmp_path / "copy" / "text_encoder" / "marked.safetensors")
    (note,) = [n for n in read_checkpoint(tmp_path / "copy").notes if n.startswith("text_encoder: ")]
    assert "1 layers are stored in int8 in a rotated basis; loading expands them exactly" in note


def test_of_several_single_files_one_must_be_named(checkpoints, tmp_path):
    for dialect in ("comfy-curve", "w4a8"):
        (source,) = (checkpoints / dialect / "diffusion_models").iterdir()
        (tmp_path / "diffusion_models").mkdir(exist_ok=True)
        (tmp_path / "diffusion_models" / source.name).symlink_to(source)
    with pytest.raises(WeightsError, match=r"holds 2 transformers: .*bf16.*w4a8.*Name one: weights: "):
        read_checkpoint(tmp_path)


def test_a_component_may_lie_elsewhere(checkpoints):
    (file,) = (checkpoints / "fp8" / "diffusion_models").iterdir()
    config = read_checkpoint(checkpoints / "original", components={"dit": file})
    assert config.dit.adaln_form == "curve"
    assert config.places["dit"] == file
    assert config.places["vae"] == checkpoints / "original" / "vae"
    with pytest.raises(WeightsError, match=r"components\.vae: .*nowhere: no such file"):
        read_checkpoint(checkpoints / "original", components={"vae": Path("/nowhere")})


def names_of(checkpoints: Path, *dialects: str) -> list[str]:
    return sorted(
        p.relative_to(checkpoints / d).as_posix()
        for d in dialects
        for p in (checkpoints / d).rglob("*")
        if p.is_file()
    )


def test_only_one_copy_of_the_weights_is_fetched_from_a_hub(checkpoints):
    both = names_of(checkpoints, "original", "diffusers")
    original = hub_files(both)
    assert "transformer/config.json" in original.names
    assert "tokenizer/tokenizer.json" in original.names
    assert "model_index.json" in original.names
    assert not [name for name in original.names if "_diffusers" in name]
    diffusers = hub_files(both, dialect="diffusers")
    assert not [name for name in diffusers.names if name.startswith(("transformer/", "vae/"))]
    assert not original.elsewhere
    apart = [*both, "pdd/heads.safetensors", "pdd/pdd_config.json", "other/heads.safetensors"]
    assert set(hub_files(apart).names) == {*original.names, "pdd/heads.safetensors", "pdd/pdd_config.json"}
    bare = [name for name in both if not name.startswith("text_encoder")]
    assert hub_files(bare).elsewhere == {"text_encoder": ("MiniMaxAI/MiniMax-H3", "FL2VA/text_encoder")}
    with pytest.raises(WeightsError, match="no vae in the repository"):
        hub_files([name for name in both if not name.startswith("vae")])


def test_indexes_name_the_shard_of_every_tensor(checkpoints):
    for dialect, path in (
        ("original", "transformer/model.safetensors.index.json"),
        ("diffusers", "transformer_diffusers/diffusion_pytorch_model.safetensors.index.json"),
    ):
        index = json.loads((checkpoints / dialect / path).read_text())
        folder = (checkpoints / dialect / path).parent
        stored = stored_tensors(folder)
        assert index["weight_map"] == {name: tensor.path.name for name, tensor in stored.items()}
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
        assert len(set(index["weight_map"].values())) > 1


def test_a_text_encoder_in_a_single_file_has_the_published_sizes(checkpoints, tmp_path):
    (tmp_path / "text_encoders").mkdir()
    file = tmp_path / "text_encoders" / "qwen.safetensors"
    file.symlink_to(checkpoints / "original" / "text_encoder" / "model.safetensors")
    # Width 5120 does not fit the tiny transformer, which shows that the file was taken and not a config.
    with pytest.raises(WeightsError, match="gives states of width 5120"):
        read_checkpoint(checkpoints / "original", components={"text_encoder": file})
    for name in ("transformer", "vae", "model_index.json"):
        (tmp_path / name).symlink_to(checkpoints / "original" / name)
    with pytest.raises(WeightsError, match="gives states of width 5120"):
        read_checkpoint(tmp_path)
