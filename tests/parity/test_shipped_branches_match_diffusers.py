"""Gate A against an independent implementation: diffusers' transformer with the shipped weights, float32."""

from __future__ import annotations

import json
import re

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors.torch import load_file
from test_h3_dit_matches_diffusers import theirs_forward
from torch import Tensor, nn

from portable_dit.evaluation.builtin.cases import CASES, load_cases
from portable_dit.models.h3_image.checkpoint import swap_halves
from training.branch_check import LIMITS, SET_UPS, Trace, load, relative_l2, trace, wishes
from training.checkpoint import decode
from training.shipped import WEIGHTS

NAMES = (
    (r"^video_patch_proj\.", "proj_in."),
    (r"^condition_proj\.", "context_embedder."),
    (r"^time_embedder\.proj_in\.", "time_embedder.linear_1."),
    (r"^time_embedder\.proj_out\.", "time_embedder.linear_2."),
    (r"^token_refiner\.blocks\.", "token_refiner.refiner_blocks."),
    (r"^blocks\.", "transformer_blocks."),
    (r"^final_layer\.norm\.", "norm_out.norm."),
    (r"^final_layer\.adaln_proj\.linear\.", "norm_out.linear."),
    (r"^final_layer\.video_out\.", "proj_out."),
    (r"\.attn\.(q|k)_norm\.", r".attn.norm_\1."),
    (r"\.attn\.out_proj\.", ".attn.to_out.0."),
    (r"\.mlp\.fc1\.", ".ff.net.0.proj."),
    (r"\.mlp\.fc2\.", ".ff.net.2."),
)


def as_diffusers(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under diffusers' names and in its row order; the heads of single steps have none there."""
    theirs = {}
    for name, tensor in ours.items():
        if name.startswith("final_layer.heads."):
            continue
        for pattern, other in NAMES:
            name = re.sub(pattern, other, name)
        if ".attn.qkv_proj." in name:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                theirs[name.replace("qkv_proj", f"to_{part}")] = rows
        else:
            theirs[name] = swap_halves(tensor) if ".ff.net.0." in name else tensor
    return theirs


@pytest.fixture(scope="module")
def diffusers_model() -> MiniMaxH3Transformer3DModel:
    config = json.loads((WEIGHTS / "transformer" / "config.json").read_text())
    model = MiniMaxH3Transformer3DModel(
        num_attention_heads=config["num_attention_heads"],
        attention_head_dim=config["attention_head_dim"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_layers"],
        num_refiner_layers=config["token_refiner_num_layers"],
        ffn_dim=config["ffn_hidden_size"],
        in_channels=config["latents_dim"],
        audio_in_channels=6,
        patch_size=tuple(config["patch_size"]),
        text_dim=config["text_dim"],
        freq_dim=config["timestep_input_dim"],
        time_embed_hidden_dim=config["time_embed_hidden_size"],
        time_embed_dim=config["time_embed_dim"],
        rope_freq_dim=config["rope_inv_freq_len"],
        norm_eps=config["norm_eps"],
        qk_norm_eps=config["qk_norm_eps"],
        final_norm_eps=config["final_norm_eps"],
    ).eval()
    state = decode(load_file(WEIGHTS / "transformer" / "model.safetensors"))
    missing, unexpected = model.load_state_dict(as_diffusers(state), strict=False)
    assert not unexpected
    assert all("audio" in name or "rope" in name for name in missing), missing
    return model


def branches(model: nn.Module, run) -> list[tuple[Tensor, Tensor]]:
    """What attention and feed-forward of each block give while `run` runs."""
    attention: list[Tensor] = []
    mlp: list[Tensor] = []
    handles = []
    for block in model.transformer_blocks:
        handles.append(block.attn.register_forward_hook(lambda m, i, out: attention.append(out.clone())))
        handles.append(block.ff.register_forward_hook(lambda m, i, out: mlp.append(out.clone())))
    run()
    for handle in handles:
        handle.remove()
    return list(zip(attention, mlp, strict=True))


@pytest.mark.parametrize("which", [0, 1], ids=["text", "one reference"])
@torch.no_grad()
def test_every_branch_of_the_engine_equals_diffusers(
    which: int, diffusers_model: MiniMaxH3Transformer3DModel
) -> None:
    ours = load(SET_UPS["float32"])
    wish = wishes(load_cases(CASES))[which]
    seen: Trace = trace(ours, wish)
    prompt = ours.encode_prompt(wish.prompt, wish.references)
    references = ours.reference_latents(wish.references, wish.seed)
    times = ours.schedule(6).times
    for step, expected in seen.blocks.items():
        found = branches(
            diffusers_model,
            lambda step=step: theirs_forward(
                diffusers_model, prompt.states[None], references, seen.latents[step], times[step]
            ),
        )
        assert len(found) == len(expected) == 6
        for (attention, mlp), block in zip(found, expected, strict=True):
            assert relative_l2(block.attention, attention) <= LIMITS["float32"]
            assert relative_l2(block.mlp, mlp) <= LIMITS["float32"]
