"""The big text encoder as a component: its bytes, its layers, offload, formats, tokens and files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from apart_device import PLUGIN
from h3_tiny import CONFIG, DIT, write_checkpoint
from plugin_shelf import Shelf

from portable_dit import Engine, Request
from portable_dit.errors import RecipeError, RequestError, WeightsError
from portable_dit.models.h3_image import counts
from portable_dit.models.h3_image.config import CanvasConfig, H3Config
from portable_dit.models.h3_image.qwen_config import TINY_QWEN, QwenConfig
from portable_dit.models.h3_image.qwen_files import byte_tokenizer, write_qwen_files
from portable_dit.models.h3_image.qwen_names import text_encoder_map
from portable_dit.models.h3_image.spec import make_spec
from portable_dit.models.h3_image.tokens import QwenTokenizer, present
from portable_dit.models.spec import Numbers, TensorSource, Workload
from portable_dit.quantize import quantization_report
from portable_dit.recipe import make_recipe
from portable_dit.request import validate_request
from portable_dit.setup import require_packages

pytest.importorskip("transformers")

from portable_dit.models.h3_image.qwen import QwenEncoder

TEXT = replace(TINY_QWEN, processor=replace(TINY_QWEN.processor, min_pixels=1024))
CANVAS = CanvasConfig(min_side=64, default_width=96, default_height=64)
H3 = replace(CONFIG, text=TEXT, dit=replace(DIT, text_dim=TEXT.hidden_size), canvas=CANVAS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("h3") / "checkpoint", H3)


def engine(folder: Path, **overrides: object) -> Engine:
    values = {"model": "h3-image", "weights": str(folder), "precision": "float32"}
    return Engine.load(make_recipe(values, overrides))


def request() -> Request:
    picture = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    return Request("a red cat", references=(picture,), size=(96, 64))


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    with engine(folder) as plain:
        return plain.generate(request()).images[0].pixels


@pytest.mark.parametrize("placement", ["component", "layerwise"])
def test_it_draws_the_same_from_the_host(
    folder: Path, shelf: Shelf, expected: np.ndarray, placement: str
) -> None:
    shelf.install("apart", PLUGIN.format(arguments=""))
    where = {"device.backend": "apart", "offload.text_encoder": placement, "offload.dit": placement}
    with engine(folder, **where) as offloaded:
        assert offloaded.plan.offload.text_encoder == placement
        for _ in range(2):
            assert np.array_equal(offloaded.generate(request()).images[0].pixels, expected)


def test_its_linears_take_a_format_of_their_own(folder: Path, expected: np.ndarray) -> None:
    with engine(folder, **{"quantization.text_encoder": "int8_row"}) as quantized:
        assert quantized.plan.formats == {"text_encoder": "int8_row", "dit": None, "vae": None}
        assert quantized.workers.loaded is not None
        encoder = quantized.workers.loaded.model.component("text_encoder")
        assert quantization_report(encoder).layers == 50 * 7
        pixels = quantized.generate(request()).images[0].pixels
    assert not np.array_equal(pixels, expected)
    assert np.abs(pixels.astype(int) - expected).mean() < 10


def test_a_missing_package_is_told_before_anything_is_loaded() -> None:
    spec = make_spec("h3-image", H3)
    require_packages(spec)
    lacking = replace(spec, requires={"no_such_package": "pip install it"})
    with pytest.raises(RecipeError, match=r"runs on the package no_such_package.*Type: pip install it"):
        require_packages(lacking)


def test_only_what_a_state_needs_is_read() -> None:
    names = [
        "lm_head.weight",
        "model.language_model.norm.weight",
        "model.language_model.embed_tokens.weight",
        "model.language_model.layers.49.mlp.up_proj.weight",
        "model.language_model.layers.50.mlp.up_proj.weight",
        "model.visual.pos_embed.weight",
    ]
    stored = {name: TensorSource((name,), lambda tensor: tensor) for name in names}
    plan = text_encoder_map(stored, TEXT)
    assert set(plan.sources) == {
        "embed_tokens.weight",
        "layers.49.mlp.up_proj.weight",
        "visual.pos_embed.weight",
    }
    assert plan.unused == {names[0], names[1], names[4]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_has_the_bytes_and_the_layers_that_the_spec_counts(dtype: torch.dtype) -> None:
    spec = make_spec("h3-image", H3)
    with torch.device("meta"):
        module = QwenEncoder(TEXT, dtype)
    name = str(dtype).removeprefix("torch.")
    size = spec.bytes_on_device("text_encoder", Workload(96, 64, 8), Numbers(name))
    assert size.weights == sum(p.numel() * p.element_size() for p in module.parameters())
    assert size.block == sum(p.numel() * p.element_size() for p in module.layers[0].parameters())
    for group in spec.linears:
        if group.component == "text_encoder":
            for layer in map(module.get_submodule, group.names()):
                assert (layer.in_features, layer.out_features) == (group.in_features, group.out_features)


def test_the_published_counts_of_tower_and_text_come_out() -> None:
    assert counts.vision_parameters(QwenConfig().vision) == 595_266_800
    assert counts.text_counts(QwenConfig()).checkpoint == 33_357_390_064
    used = counts.text_counts(QwenConfig())
    assert round(2 * (50 * used.block + used.other) / 1e9, 1) == 51.5


def test_random_weights_need_no_files() -> None:
    config = replace(H3, folder=None)
    from portable_dit.models.h3_image.model import build

    model = build(config, dict.fromkeys(("dit", "vae", "text_encoder"), torch.float32))
    assert model.component("text_encoder").config == TEXT


def test_marks_that_a_prompt_spells_out_are_ordinary_characters() -> None:
    tokenizer = QwenTokenizer(byte_tokenizer(TEXT))
    shown = present("a <|image_pad|> b", [(64, 64)], tokenizer, TEXT)
    assert int(shown.pads.sum()) == 4
    assert shown.positions.shape == (3, len(shown.ids))


def test_a_prompt_beyond_the_encoder_and_one_of_nothing_are_refused() -> None:
    tokenizer = QwenTokenizer(byte_tokenizer(TEXT))
    with pytest.raises(RequestError, match=r"5,000 tokens.*at most 4,096"):
        present("x" * 5000, [], tokenizer, TEXT)
    with pytest.raises(RequestError, match="holds no words"):
        present("", [], tokenizer, TEXT)


def test_references_that_leave_no_room_for_the_prompt_are_refused_before_loading(tmp_path: Path) -> None:
    write_qwen_files(tmp_path, TEXT)
    spec = make_spec("h3-image", replace(H3, folder=tmp_path))
    longest = Request("x" * TEXT.max_tokens)
    assert validate_request(longest, spec).prompt == longest.prompt
    picture = np.zeros((64, 96, 3), np.uint8)
    with pytest.raises(RequestError, match=r"4,096 tokens, and [\d,]+ for 1 reference: .*leave references"):
        validate_request(replace(longest, references=(picture,)), spec)


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no tokenizer; looked for tokenizer/tokenizer\.json"):
        QwenTokenizer.from_checkpoint(tmp_path)
    write_qwen_files(tmp_path, TEXT)
    file = tmp_path / "tokenizer" / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="not readable as JSON"):
        QwenTokenizer.from_checkpoint(tmp_path)


def test_the_plan_counts_what_each_reference_adds_to_the_text() -> None:
    spec = make_spec("h3-image", H3Config(text=QwenConfig()))
    plain, edit = Workload(2048, 2048, 100), Workload(2048, 2048, 100, ((1024, 1024), (2048, 1024)))
    vision = 1024 + 2048
    assert spec.rows(edit) - spec.rows(plain) == 2 * vision + 2 * 9
    heads = {
        (r.head_dim, r.rows)
        for name, r in spec.attention_requests(edit, "bfloat16")
        if name == "text_encoder"
    }
    assert heads == {(128, 100 + vision + 18), (72, 4 * 1024), (72, 4 * 2048)}
