"""Random checkpoints have the names of the real classes, and 8-bit forms decode as their library does."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3, MiniMaxH3Transformer3DModel

from portable_dit.models.h3_image.dialects import W4A8_LEVELS
from portable_dit.models.h3_image.markers import read_marker
from portable_dit.models.h3_image.quantized import decode_w4a8
from portable_dit.models.h3_image.random_checkpoint import FULL, TINY, plan_random, qwen_tensors
from portable_dit.rotation import hadamard, rotate

AUDIO = ("audio_",)


def planned(config: str, folder: str) -> dict[str, tuple[int, ...]]:
    return {
        name: shape
        for file in plan_random(config, "diffusers")
        if file.path.startswith(f"{folder}/")
        for name, (_, shape) in file.tensors.items()
    }


def test_diffusers_files_have_the_names_and_shapes_of_its_transformer():
    with torch.device("meta"):
        theirs = MiniMaxH3Transformer3DModel().state_dict()
    expected = {name: tuple(t.shape) for name, t in theirs.items() if not name.startswith(AUDIO)}
    found = planned("full", "transformer_diffusers")
    heads = {name for name in found if name.startswith("pdd_")}
    assert {name: shape for name, shape in found.items() if name not in heads} == expected


def test_diffusers_files_have_the_names_and_shapes_of_its_vae():
    with torch.device("meta"):
        theirs = AutoencoderKLMiniMaxH3(
            temporal_downsample_factors=(1,) * 6, decoder_num_layers=24, decoder_num_attention_heads=16
        ).state_dict()
    assert planned("full", "vae_diffusers") == {name: tuple(t.shape) for name, t in theirs.items()}


@pytest.mark.parametrize("config", [TINY, FULL], ids=["tiny", "full"])
def test_the_text_encoder_has_the_names_and_shapes_of_transformers(config):
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    with torch.device("meta"):
        theirs = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**config.text.to_dict()))
    assert qwen_tensors(config.text) == {name: tuple(t.shape) for name, t in theirs.state_dict().items()}


def test_the_full_text_encoder_has_the_published_parameters():
    assert sum(torch.Size(shape).numel() for shape in qwen_tensors(FULL.text).values()) == 33_357_390_064


@pytest.mark.parametrize("size", [4, 64, 256])
def test_the_rotation_is_symmetric_and_its_own_inverse(size):
    matrix = hadamard(size)
    assert torch.equal(matrix, matrix.t())
    assert torch.allclose(matrix @ matrix, torch.eye(size), atol=1e-6)


@pytest.fixture
def kitchen():
    return pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")


def test_rotated_int8_decodes_as_comfy_kitchen_computes(kitchen):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (48, 512), generator=generator, dtype=torch.int8)
    scale = torch.rand(48, generator=generator) * 0.01 + 0.001
    ours = rotate(values.float() * scale[:, None], 256)
    x = torch.randn(256, 512, generator=generator)
    theirs = kitchen.int8_linear(
        x, values, scale[:, None], out_dtype=torch.float32, convrot=True, convrot_groupsize=256
    )
    plain = kitchen.int8_linear(x, values, scale[:, None], out_dtype=torch.float32, convrot=False)
    exact = x @ ours.t()
    # Theirs rounds its input to 8 bits per row, so the two agree to a percent and not to the last bit.
    assert (theirs - exact).norm() / exact.norm() < 0.015
    assert (plain - exact).norm() / exact.norm() > 1


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("codebook", [True, False])
def test_w4a8_decodes_as_comfy_kitchen_does(kitchen, symmetric, codebook):
    weight = torch.randn(48, 512, generator=torch.Generator().manual_seed(1)) * 0.05
    packed, s_rel, s_channel, correction, levels = kitchen.quantize_w4a8_int8_weight(
        weight, symmetric=symmetric, codebook=codebook and symmetric
    )
    theirs = kitchen.dequantize_w4a8_int8_weight(
        packed, s_rel, s_channel, levels, correction, output_dtype=torch.float32
    )
    ours = rotate(decode_w4a8(packed, s_rel, s_channel, levels, correction), 256)
    assert torch.allclose(ours, theirs, atol=1e-6, rtol=1e-5)
    assert (ours - weight).norm() / weight.norm() < 0.12


def test_fp8_decodes_as_comfy_kitchen_does(kitchen):
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))
    scale = weight.abs().amax() / 448
    values = kitchen.quantize_per_tensor_fp8(weight, scale, torch.float8_e4m3fn)
    theirs = kitchen.dequantize_per_tensor_fp8(values, scale, torch.float32)
    assert torch.equal(values.float() * scale, theirs)


def test_levels_are_sorted_and_fields_may_lie_under_params():
    assert list(W4A8_LEVELS) == sorted(W4A8_LEVELS)
    text = b'{"format": "int8_tensorwise", "params": {"convrot": true, "convrot_groupsize": 64}}'
    assert read_marker("x.comfy_quant", text).rotated == 64
