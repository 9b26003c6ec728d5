"""The layers of our small text encoder against transformers' Qwen3, float32, every parameter random."""

from __future__ import annotations

import torch
from h3_pairs import randomize
from transformers import Qwen3Config, Qwen3Model

from portable_dit.models.h3_image.config import TextConfig
from portable_dit.models.h3_image.text import MiniTextEncoder

CONFIG = TextConfig(
    vocab_size=20, table_dim=6, hidden_size=24, num_layers=2, num_attention_heads=3, head_dim=8, ffn_size=32
)


@torch.no_grad()
def test_states_equal_those_of_qwen3_before_its_final_norm() -> None:
    ours = MiniTextEncoder(CONFIG).eval()
    randomize(ours)
    theirs = Qwen3Model(
        Qwen3Config(
            vocab_size=20,
            hidden_size=24,
            intermediate_size=32,
            num_hidden_layers=3,  # one more than ours, since the last hidden state is normed
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=8,
            rms_norm_eps=CONFIG.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope_theta},
            attention_bias=False,
        )
    ).eval()
    layers = {name: t for name, t in ours.state_dict().items() if name.startswith("layers.")}
    missing, unexpected = theirs.load_state_dict(layers, strict=False)
    assert unexpected == []
    assert all(name.startswith(("layers.2.", "norm.", "embed_tokens.")) for name in missing)
    ids = torch.randint(0, 20, (2, 9), generator=torch.Generator().manual_seed(1))
    embedded = ours.embed_proj(ours.embed_tokens(ids))
    expected = theirs(inputs_embeds=embedded, output_hidden_states=True, use_cache=False).hidden_states[2]
    assert expected.abs().max() > 0.5
    assert (ours(ids) - expected).abs().max() < 1e-5 * max(float(expected.abs().max()), 1.0)
