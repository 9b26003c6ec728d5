"""A tiny checkpoint of H3-Image in its real layout, through our engine and through an independent chain.

The chain is put together here from diffusers' modules and helpers and from transformers' whole text encoder,
so that nothing in it is ours: not the resizing, tokens, layout, noise, loop, nor the decoding. Both must give
the same pixels within one level.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3, MiniMaxH3Scheduler, MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3 import before_denoise, encoders
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from portable_dit import Engine, Request
from portable_dit.models.h3_image.qwen_config import TINY_QWEN
from portable_dit.models.h3_image.qwen_files import write_qwen_files
from portable_dit.recipe import make_recipe

WIDTH, HEIGHT, SEED = 128, 96, 5
PROMPT = "put <Picture 1> on a blue table"
PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TILE, OVERLAP = 64, 16
# As given, and as an area of 96 x 64 with sides in multiples of 32 makes them. Width, height.
REFERENCES = (((100, 70), (96, 64)), ((64, 64), (64, 64)), ((50, 120), (64, 128)))
DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "hidden_size": 24,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "ffn_dim": 32,
    "in_channels": 4,
    "audio_in_channels": 6,
    "patch_size": (1, 2, 2),
    "text_dim": TINY_QWEN.hidden_size,
    "freq_dim": 8,
    "time_embed_hidden_dim": 24,
    "time_embed_dim": 16,
    "rope_freq_dim": 2,
}
VAE = {
    "latent_channels": 4,
    "block_out_channels": (8, 8, 8, 8),
    "layers_per_block": 1,
    "spatial_downsample_factors": (2, 2, 2, 2),
    "temporal_downsample_factors": (1, 1, 1, 1),
    "norm_num_groups": 4,
    "decoder_num_layers": 2,
    "decoder_num_attention_heads": 2,
    "decoder_attention_head_dim": 8,
    "decoder_num_register_tokens": 2,
    "decoder_ffn_mult": 2,
    "latents_mean": (0.1, -0.2, 0.3, 0.0),
    "latents_std": (1.1, 0.9, 1.3, 0.7),
}
# The tower takes pictures as small as ours without enlarging them.
TEXT = replace(TINY_QWEN, processor=replace(TINY_QWEN.processor, min_pixels=1024))


def randomize(module: nn.Module, seed: int) -> None:
    """Every parameter at random, so that no branch is silent."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        near_one = parameter.ndim == 1 and not name.endswith("bias")
        scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
        parameter.data.copy_(scale * noise + (1.0 if near_one else 0.0))


class Chain:
    """The model as its publishers' libraries have it, and its checkpoint on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dit = MiniMaxH3Transformer3DModel(**DIT).eval()
        self.vae = AutoencoderKLMiniMaxH3(**VAE).eval()
        self.text = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**TEXT.to_dict())).eval()
        for seed, module in enumerate((self.dit, self.vae, self.text)):
            randomize(module, seed)
        self.vae.enable_tiling(TILE, TILE, OVERLAP, OVERLAP)
        generator = torch.Generator().manual_seed(9)
        shape = self.dit.proj_out.weight.shape
        self.heads = [
            (
                torch.randn(shape, generator=generator) * shape[1] ** -0.5,
                torch.randn(shape[0], generator=generator) * 0.1,
            )
            for _ in range(6)
        ]
        self._write()
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
        known = json.loads((folder / "processor" / "preprocessor_config.json").read_text())
        known.pop("image_processor_type")
        self.processor = Qwen2VLImageProcessorPil(**known)

    def _write(self) -> None:
        heads = {}
        for step, (weight, bias) in enumerate(self.heads):
            heads |= {f"pdd_out.{step}.weight": weight, f"pdd_out.{step}.bias": bias}
        parts = {
            "transformer": ({**DIT, "pdd_heads": 6}, {**self.dit.state_dict(), **heads}),
            "vae": ({**VAE, "tile_size": TILE, "tile_overlap": OVERLAP}, self.vae.state_dict()),
            "text_encoder": (TEXT.to_dict(), self.text.state_dict()),
        }
        for name, (config, tensors) in parts.items():
            (self.folder / name).mkdir()
            (self.folder / name / "config.json").write_text(json.dumps(config))
            save_file(dict(tensors), self.folder / name / "model.safetensors")
        write_qwen_files(self.folder, TEXT)
        scheduler = {"shift": 12.0, "reference_rule": "area", "reference_pixels": 96 * 64}
        (self.folder / "scheduler").mkdir()
        (self.folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
        canvas = {"min_side": 64, "default_width": WIDTH, "default_height": HEIGHT}
        (self.folder / "model_index.json").write_text(json.dumps({"canvas": canvas}))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _read(self, pictures: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """State 50 of the text encoder, [1, L, C], and the tags of its rows."""
        seen = self.processor(images=list(pictures), return_tensors="pt") if pictures else {}
        ids: list[int] = []
        tags: list[int] = []
        for number, grid in enumerate(seen["image_grid_thw"] if pictures else (), 1):
            label = self._ids(f"<Picture {number}>: ")
            pads = int(grid.prod()) // 4
            ids += [
                *label,
                TEXT.vision_start_token_id,
                *[TEXT.image_token_id] * pads,
                TEXT.vision_end_token_id,
            ]
            tags += [1] * len(label) + [0] * (pads + 2)
        # The prompt names a picture in plain words, which are not the marks of one.
        words = self._ids(PROMPT)
        state = encoders.get_qwen3vl_prompt_embeds(
            self.text,
            SimpleNamespace(create_mm_token_type_ids=self._kinds),
            ids + words,
            dict(seen),
            dtype=torch.float32,
        )
        return state, torch.tensor(tags + [1] * len(words))

    @staticmethod
    def _kinds(batch: list[list[int]]) -> list[list[int]]:
        return [[int(token == TEXT.image_token_id) for token in ids] for ids in batch]

    def _encode(self, picture: np.ndarray) -> Tensor:
        pixels = torch.from_numpy(picture.copy()).permute(2, 0, 1)[None, :, None]
        latents: Tensor = encoders.encode_vae_condition(self.vae, pixels, PIXEL_MEAN, PIXEL_STD)
        return latents

    @torch.no_grad()
    def draw(self, references: Sequence[np.ndarray], *, noise: str = "fresh") -> np.ndarray:
        """Pixels uint8 [H, W, 3]. references: already at the model's size."""
        state, text_tags = self._read(references)
        clean = [self._encode(picture) for picture in references]
        running = torch.Generator().manual_seed(SEED)
        latents = []
        for z in clean:
            if noise == "fresh":
                generator = torch.Generator().manual_seed(SEED)
                extra = torch.randn((1, 4, 1 + len(clean), *z.shape[-2:]), generator=generator)[:, :, :1]
            else:
                extra = torch.randn(z.shape, generator=running)
            latents.append(0.999 * z + 0.001 * extra)
        h, w = HEIGHT // 16, WIDTH // 16
        target = torch.randn((1, 4, 1, h, w), generator=running)
        positions, tags, video, audio, text, fixed, _ = (
            before_denoise.MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
                text_token_tags=text_tags,
                references=[SimpleNamespace(kind="image", has_audio=False) for _ in references],
                condition_latents=latents,
                audio_condition_latents=[],
                num_latent_frames=1,
                latent_height=h,
                latent_width=w,
                num_audio_latents=0,
                patch_size=(1, 2, 2),
                audio_channels=2,
                audio_tag=2,
                video_tag=0,
            )
        )
        rows = torch.cat([before_denoise.patchify_video_latents(z, (1, 2, 2)) for z in (*latents, target)])
        scheduler = MiniMaxH3Scheduler(shift=12.0)
        scheduler.set_timesteps(7)
        for step, time in enumerate(scheduler.timesteps):
            times, indices = before_denoise.MiniMaxH3SetTimestepsStep.build_row_timesteps(
                video, audio, fixed, 0, len(text), float(time), float(time), max(float(time), 0.999), 1.0
            )
            self.dit.proj_out.weight.copy_(self.heads[step][0])
            self.dit.proj_out.bias.copy_(self.heads[step][1])
            velocity = self.dit(
                hidden_states=rows[None],
                audio_hidden_states=torch.zeros(1, 0, 6),
                encoder_hidden_states=state,
                timestep=times,
                timestep_indices=indices,
                token_tags=tags,
                position_ids=positions,
                video_indices=video,
                audio_indices=audio,
                text_indices=text,
            ).sample
            rows[fixed:] = scheduler.step(velocity[0, fixed:], time, rows[fixed:]).prev_sample
        z = rows[fixed:].reshape(h // 2, w // 2, 4, 2, 2).permute(2, 0, 3, 1, 4).reshape(1, 4, 1, h, w)
        mean, std = (torch.tensor(VAE[name]).view(1, 4, 1, 1, 1) for name in ("latents_mean", "latents_std"))
        pixels = self.vae._decode_clip(z * std + mean)[0, :, 0]
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
        array: np.ndarray = ((pixels * std + mean).clamp(0, 1) * 255).permute(1, 2, 0).numpy()
        return array


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(tmp_path_factory.mktemp("h3-image"))


def pictures(count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """References as a user gives them, and as Pillow resizes them to the sizes that the rule asks for."""
    generator = np.random.default_rng(3)
    given, sized = [], []
    for (width, height), size in REFERENCES[:count]:
        given.append(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
        image = Image.fromarray(given[-1])
        sized.append(
            np.asarray(image.resize(size, Image.Resampling.LANCZOS) if image.size != size else image)
        )
    return given, sized


def ours(folder: Path, references: Sequence[np.ndarray], **overrides: object) -> np.ndarray:
    values = {"model": "h3-image", "weights": str(folder), "precision": "float32", **overrides}
    with Engine.load(make_recipe(values)) as engine:
        request = Request(PROMPT, size=(WIDTH, HEIGHT), seed=SEED, references=tuple(references))
        return engine.generate(request).images[0].pixels


@pytest.mark.parametrize("count", [0, 1, 3])
def test_pixels_equal_those_of_diffusers_and_transformers(chain: Chain, count: int) -> None:
    given, sized = pictures(count)
    expected = chain.draw(sized)
    assert expected.std() > 20, "the comparison would be silent"
    drawn = ours(chain.folder, given)
    assert np.abs(drawn.astype(np.float32) - expected).max() <= 1.0


def test_the_noise_convention_of_diffusers_is_a_config_away(chain: Chain, tmp_path: Path) -> None:
    """A thousandth of noise on references is too little for pixels to tell; the target's own is not."""
    given, sized = pictures(2)
    for part in chain.folder.iterdir():
        (tmp_path / part.name).symlink_to(part)
    (tmp_path / "scheduler").unlink()
    (tmp_path / "scheduler").mkdir()
    known = json.loads((chain.folder / "scheduler" / "scheduler_config.json").read_text())
    text = json.dumps({**known, "reference_noise": "running"})
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(text)
    expected = chain.draw(sized, noise="running")
    assert np.abs(ours(tmp_path, given).astype(np.float32) - expected).max() <= 1.0
    assert np.abs(ours(chain.folder, given).astype(np.float32) - expected).max() > 5.0
