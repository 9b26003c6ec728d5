"""Requests with every count of references, 1 to 16, against the layout that diffusers' helpers build."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import before_denoise
from torch import Tensor

from portable_dit.models.h3_image.noise import reference_noises, target_noise
from portable_dit.models.h3_image.packing import REFERENCE_TIME, pack
from portable_dit.models.h3_image.qwen_config import TINY_QWEN
from portable_dit.models.h3_image.qwen_files import write_qwen_files
from portable_dit.models.h3_image.tokens import QwenTokenizer, present

COUNTS = range(1, 17)
TARGET = (8, 12)
# All of another shape, so that an exchange of two shows. Width, height in pixels.
SIZES = [(64 + 32 * (i % 5), 64 + 32 * (i // 5)) for i in range(16)]
PROMPT = "a cat"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> QwenTokenizer:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_qwen_files(folder, TINY_QWEN)
    return QwenTokenizer.from_checkpoint(folder)


def latents(count: int) -> list[Tensor]:
    return [torch.zeros(1, 24, height // 16, width // 16) for width, height in SIZES[:count]]


@pytest.mark.parametrize("count", COUNTS)
def test_the_text_has_label_mark_rows_and_mark_for_each_in_order(
    tokenizer: QwenTokenizer, count: int
) -> None:
    shown = present(PROMPT, SIZES[:count], tokenizer, TINY_QWEN)
    ids, tags, here = shown.ids.tolist(), shown.tags.tolist(), 0
    for number, (width, height) in enumerate(SIZES[:count], 1):
        label = tokenizer.encode(f"<Picture {number}>: ")
        rows = (width // 32) * (height // 32)
        block = [
            TINY_QWEN.vision_start_token_id,
            *[TINY_QWEN.image_token_id] * rows,
            TINY_QWEN.vision_end_token_id,
        ]
        assert ids[here : here + len(label) + len(block)] == label + block
        assert tags[here : here + len(label) + len(block)] == [1] * len(label) + [0] * len(block)
        here += len(label) + len(block)
    assert ids[here:] == tokenizer.encode(PROMPT)
    assert tags[here:] == [1] * (len(ids) - here)


@pytest.mark.parametrize("count", COUNTS)
def test_positions_tags_and_times_equal_diffusers(tokenizer: QwenTokenizer, count: int) -> None:
    shown = present(PROMPT, SIZES[:count], tokenizer, TINY_QWEN)
    pictures, text_tags = latents(count), torch.from_numpy(shown.tags)
    positions, tags, video, audio, text, fixed, _ = (
        before_denoise.MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
            text_token_tags=text_tags,
            references=[SimpleNamespace(kind="image", has_audio=False) for _ in pictures],
            condition_latents=[z[:, :, None] for z in pictures],
            audio_condition_latents=[],
            num_latent_frames=1,
            latent_height=TARGET[0],
            latent_width=TARGET[1],
            num_audio_latents=0,
            patch_size=(1, 2, 2),
            audio_channels=2,
            audio_tag=2,
            video_tag=0,
        )
    )
    packing = pack(text_tags, [(z.shape[-2], z.shape[-1]) for z in pictures], TARGET)
    assert torch.equal(packing.positions, positions)
    assert torch.equal(packing.tags, tags)
    assert packing.reference_rows == fixed
    times, indices = before_denoise.MiniMaxH3SetTimestepsStep.build_row_timesteps(
        video, audio, fixed, 0, len(text), 0.25, 0.25, 0.999, 1.0
    )
    assert times.tolist() == pytest.approx([0.25, 0.999])
    assert torch.equal(packing.row_times == REFERENCE_TIME, indices == 1)


@pytest.mark.parametrize("count", COUNTS)
def test_fresh_noise_is_the_first_of_one_frame_more_than_there_are_references(count: int) -> None:
    shapes = [z.shape[1:] for z in latents(count)]
    noises, _ = reference_noises(shapes, 7, convention="fresh")
    for noise, (channels, h, w) in zip(noises, shapes, strict=True):
        whole = torch.randn(1, channels, 1 + count, h, w, generator=torch.Generator().manual_seed(7))
        assert torch.equal(noise, whole[:, :, 0])
    plain = torch.randn(1, 24, *TARGET, generator=torch.Generator().manual_seed(7))
    assert torch.equal(target_noise((24, *TARGET), shapes, 7, convention="fresh"), plain)


@pytest.mark.parametrize("count", COUNTS)
def test_running_noise_comes_from_one_generator_in_order_and_the_target_last(count: int) -> None:
    shapes = [z.shape[1:] for z in latents(count)]
    noises, _ = reference_noises(shapes, 7, convention="running")
    one = torch.Generator().manual_seed(7)
    for noise, shape in zip(noises, shapes, strict=True):
        assert torch.equal(noise, torch.randn(1, *shape, generator=one))
    expected = torch.randn(1, 24, *TARGET, generator=one)
    assert torch.equal(target_noise((24, *TARGET), shapes, 7, convention="running"), expected)
