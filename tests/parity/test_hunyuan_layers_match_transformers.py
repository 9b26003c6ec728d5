"""HunyuanImage-3.0's layers against transformers' HunYuan mixture of experts, which has the same layer.

The published classes of the picture model are not in any package. Its layer is that of HunYuan-MoE (rotary
before the head norms, router, shared MLP), so transformers' own rendering of it is the judge: with text
positions as they are, and with the picture's rotary table and mask put in.
"""

from dataclasses import replace

import pytest
import torch
from transformers.models.hunyuan_v1_moe.configuration_hunyuan_v1_moe import HunYuanMoEV1Config
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import (
    HunYuanMoEV1DecoderLayer,
    HunYuanMoEV1RotaryEmbedding,
)

from portable_dit.masks import Causal, to_keep
from portable_dit.models.hunyuan_image_3.checkpoint import swap_halves, tensor_map
from portable_dit.models.hunyuan_image_3.config import HunyuanConfig
from portable_dit.models.hunyuan_image_3.dit import (
    HunyuanTransformer,
    image_mask,
    image_positions,
    rotary_of,
    text_positions,
)
from portable_dit.models.hunyuan_image_3.names import dit_tensors
from portable_dit.models.hunyuan_image_3.random_checkpoint import TINY

CONFIG: HunyuanConfig = replace(TINY, dit=replace(TINY.dit, num_hidden_layers=2))
DIT = CONFIG.dit
CPU = torch.device("cpu")
ROWS, CELLS = 17, 24


@pytest.fixture(scope="module")
def stored() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.2)
        + (len(shape) == 1 and name.endswith("weight"))
        for name, shape in dit_tensors(DIT, CONFIG.vae.latent_channels).items()
    }


@pytest.fixture(scope="module")
def ours(stored) -> HunyuanTransformer:
    model = HunyuanTransformer(DIT, CONFIG.vae.latent_channels).eval()
    sources = tensor_map("dit", {n: tuple(t.shape) for n, t in stored.items()}, CONFIG).sources
    made = {name: source.make(*(stored[n] for n in source.names)) for name, source in sources.items()}
    state = model.state_dict()
    for name in state:
        path = name.removesuffix(".weight")
        experts = [made[key] for e in range(DIT.num_experts) if (key := f"{path}.{e}.weight") in made]
        state[name] = torch.stack(experts) if experts else made[name]
    model.load_state_dict(state)
    return model


@pytest.fixture(scope="module")
def theirs(stored) -> torch.nn.ModuleList:
    config = HunYuanMoEV1Config(
        hidden_size=DIT.hidden_size,
        intermediate_size=DIT.moe_intermediate_size,
        num_attention_heads=DIT.num_attention_heads,
        num_key_value_heads=DIT.num_key_value_heads,
        head_dim=DIT.attention_head_dim,
        num_experts=DIT.num_experts,
        moe_topk=DIT.moe_topk,
        rms_norm_eps=DIT.rms_norm_eps,
        rope_theta=DIT.rope_theta,
        attention_bias=False,
        vocab_size=8,
    )
    config._attn_implementation = "eager"
    layers = torch.nn.ModuleList(HunYuanMoEV1DecoderLayer(config, n) for n in range(2)).eval()
    layers.config = config
    for number, layer in enumerate(layers):
        layer.load_state_dict(_their_names(stored, f"model.layers.{number}."))
    return layers


def _their_names(stored: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """One layer's stored tensors as transformers holds them, regrouped by what its own docs say."""
    mine = {name.removeprefix(prefix): t for name, t in stored.items() if name.startswith(prefix)}
    groups, queries = DIT.num_key_value_heads, DIT.num_attention_heads // DIT.num_key_value_heads
    fused = mine["self_attn.qkv_proj.weight"].view(groups, queries + 2, DIT.attention_head_dim, -1)
    up, gate = mine["mlp.shared_mlp.gate_and_up_proj.weight"].chunk(2)
    experts = range(DIT.num_experts)
    return {
        "self_attn.q_proj.weight": fused[:, :queries].flatten(0, 2),
        "self_attn.k_proj.weight": fused[:, queries].flatten(0, 1),
        "self_attn.v_proj.weight": fused[:, queries + 1].flatten(0, 1),
        "mlp.shared_mlp.gate_proj.weight": gate,
        "mlp.shared_mlp.up_proj.weight": up,
        "mlp.experts.gate_up_proj": torch.stack(
            [swap_halves(mine[f"mlp.experts.{e}.gate_and_up_proj.weight"]) for e in experts]
        ),
        "mlp.experts.down_proj": torch.stack([mine[f"mlp.experts.{e}.down_proj.weight"] for e in experts]),
        **{
            name: tensor
            for name, tensor in mine.items()
            if "qkv_proj" not in name and ".experts." not in name and "gate_and_up" not in name
        },
    }


def _through(theirs, x, cos, sin, keep):
    bias = torch.zeros(keep.shape).masked_fill(~keep, float("-inf"))[None, None]
    for layer in theirs:
        x = layer(x, attention_mask=bias, position_embeddings=(cos, sin))
        x = x[0] if isinstance(x, tuple) else x
    return x


@torch.no_grad()
def test_text_rows_match(ours, theirs):
    x = torch.randn(2, ROWS, DIT.hidden_size, generator=torch.Generator().manual_seed(1))
    rotary = rotary_of(text_positions(0, ROWS, CPU), DIT)
    cos, sin = HunYuanMoEV1RotaryEmbedding(theirs.config)(x, torch.arange(ROWS)[None])
    assert torch.allclose(torch.cat([rotary.cos] * 2, -1), cos, rtol=0, atol=1e-6)
    assert torch.allclose(torch.cat([rotary.sin] * 2, -1), sin, rtol=0, atol=1e-6)
    wanted = _through(theirs, x, cos, sin, to_keep(Causal(), ROWS, ROWS, CPU))
    found = x
    for block in ours.layers:
        found, _ = block(found, rotary, Causal())
    assert (found - wanted).abs().max() < 2e-5


@torch.no_grad()
def test_a_sequence_with_a_picture_matches_and_so_does_one_behind_a_kept_prefix(ours, theirs):
    x = torch.randn(2, ROWS + 1 + CELLS, DIT.hidden_size, generator=torch.Generator().manual_seed(2))
    positions = torch.cat([text_positions(0, ROWS + 1, CPU), image_positions(ROWS + 1, (4, 6), CPU)])
    rotary = rotary_of(positions, DIT)
    cos, sin = torch.cat([rotary.cos] * 2, -1), torch.cat([rotary.sin] * 2, -1)
    keep = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    keep[ROWS + 1 :, ROWS + 1 :] = True
    wanted = _through(theirs, x, cos, sin, keep)
    mask = image_mask(ROWS, 1, CELLS)
    found = x
    for block in ours.layers:
        found, _ = block(found, rotary, mask)
    assert (found - wanted).abs().max() < 2e-5
    prefix, step = ours.prefill(x[:, :ROWS]), x[:, ROWS:]
    for layer, block in enumerate(ours.layers):
        step, _ = block(step, rotary_of(positions[ROWS:], DIT), mask, prefix.of(layer))
    assert (step - wanted[:, ROWS:]).abs().max() < 2e-5
