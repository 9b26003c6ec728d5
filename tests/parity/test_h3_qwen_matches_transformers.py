"""The big text encoder against transformers' whole Qwen3-VL, tiny, in float32, every parameter random."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from h3_pairs import randomize
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from portable_dit.models.h3_image.qwen import QwenConditioner, QwenEncoder, patches
from portable_dit.models.h3_image.qwen_config import TINY_QWEN, QwenConfig
from portable_dit.models.h3_image.qwen_files import write_qwen_files
from portable_dit.models.h3_image.qwen_names import text_encoder_map
from portable_dit.models.h3_image.tokens import QwenTokenizer, present
from portable_dit.models.spec import TensorSource

SIZES = ((256, 256), (320, 256), (256, 512))  # width, height; not below the processor's least area
PROMPT = "put the cat of <Picture 1> on the chair"


def full_model(dtype: torch.dtype = torch.float32) -> Qwen3VLForConditionalGeneration:
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**TINY_QWEN.to_dict())).eval()
    randomize(model)
    return model.to(dtype)


def ours_of(full: Qwen3VLForConditionalGeneration) -> QwenEncoder:
    encoder = QwenEncoder(TINY_QWEN, full.dtype)
    stored = {name: TensorSource((name,), lambda tensor: tensor) for name in full.state_dict()}
    plan = text_encoder_map(stored, TINY_QWEN)
    weights = full.state_dict()
    encoder.load_state_dict({name: weights[source.names[0]] for name, source in plan.sources.items()})
    return encoder


def pictures(count: int) -> list[np.ndarray]:
    generator = np.random.default_rng(7)
    return [generator.integers(0, 256, (h, w, 3), dtype=np.uint8) for w, h in SIZES[:count]]


def processor() -> Qwen2VLImageProcessorPil:
    known = TINY_QWEN.processor_dict()
    known.pop("image_processor_type")
    return Qwen2VLImageProcessorPil(**known)


@torch.no_grad()
def state_50(
    full: Qwen3VLForConditionalGeneration, tokenizer: QwenTokenizer, references: list[np.ndarray]
) -> torch.Tensor:
    """The state as transformers' own model and processor give it, from ids that are put together here."""
    ids: list[int] = []
    seen = processor()(images=references, return_tensors="pt") if references else {}
    for number, grid in enumerate(seen["image_grid_thw"] if references else (), 1):
        ids += tokenizer.encode(f"<Picture {number}>: ")
        ids += [508, *[509] * (int(grid.prod()) // 4), 511]
    tokens = torch.tensor([ids + tokenizer.encode(PROMPT)])
    out = full.model(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        mm_token_type_ids=(tokens == 509).long(),
        output_hidden_states=True,
        use_cache=False,
        **seen,
    )
    state: torch.Tensor = out.hidden_states[50][0]
    return state


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> QwenTokenizer:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_qwen_files(folder, TINY_QWEN)
    return QwenTokenizer.from_checkpoint(folder)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_states_equal_hidden_state_50_of_the_whole_model(tokenizer: QwenTokenizer, count: int) -> None:
    full = full_model()
    references = pictures(count)
    expected = state_50(full, tokenizer, references)
    states = QwenConditioner(ours_of(full), tokenizer)(PROMPT, references).states
    assert states.shape == expected.shape
    assert expected.abs().max() > 0.5
    assert (states - expected).abs().max() < 1e-5 * max(float(expected.abs().max()), 1.0)


def test_it_is_not_the_last_state_nor_a_normed_one(tokenizer: QwenTokenizer) -> None:
    """Guards the test above: neighbours of the right state are far from it."""
    full = full_model()
    tokens = torch.tensor([tokenizer.encode(PROMPT)])
    with torch.no_grad():
        out = full.model(input_ids=tokens, output_hidden_states=True, use_cache=False).hidden_states
    ours = QwenConditioner(ours_of(full), tokenizer)(PROMPT).states
    for other in (out[49][0], out[51][0]):
        assert (ours - other).abs().max() > 1e-2


@pytest.mark.parametrize("size", [*SIZES, (64, 96), (4608, 4096), (6272, 2688), (250, 333)])
def test_pictures_are_sized_and_cut_as_the_processor_does(size: tuple[int, int]) -> None:
    width, height = size
    config = QwenConfig()
    assert config.vision_size(width, height)[::-1] == smart_resize(
        height, width, 32, config.processor.min_pixels, config.processor.max_pixels
    )
    if width * height > 400_000:
        return
    picture = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
    theirs = processor()(images=[picture], return_tensors="pt")
    ours = patches(picture, TINY_QWEN)
    assert ours.shape == theirs["pixel_values"].shape
    assert (ours - theirs["pixel_values"]).abs().max() < 1e-5


@pytest.mark.parametrize("count", range(1, 17))
def test_positions_equal_those_of_transformers(tokenizer: QwenTokenizer, count: int) -> None:
    sizes = [SIZES[i % len(SIZES)] for i in range(count)]
    shown = present(PROMPT, sizes, tokenizer, TINY_QWEN)
    with torch.device("meta"):
        full = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**TINY_QWEN.to_dict()))
    grids = torch.tensor([(1, 2 * down, 2 * across) for down, across in shown.grids])
    ids, pads = torch.from_numpy(shown.ids), torch.from_numpy(shown.pads)
    expected, _ = full.model.get_rope_index(
        ids[None], image_grid_thw=grids, mm_token_type_ids=pads[None].long()
    )
    assert torch.equal(torch.from_numpy(shown.positions), expected[:, 0])
