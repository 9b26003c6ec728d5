"""From a prompt to text states.

A conditioner gives states [L, text_dim] and a tag for each row. The small checkpoint has a conditioner of its
own, a frozen word-piece table and two causal Qwen3-style layers; the big one takes a layer of Qwen3-VL, which
sees the references too and has the same kind of layers (`qwen`). Both answer through `Conditioning`, so
nothing behind this file knows which one spoke.

Letters: B batch, L tokens, C channels, N heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from portable_dit.masks import NO_MASK, Causal, Mask
from portable_dit.models.h3_image.config import TextConfig
from portable_dit.models.h3_image.qwen_config import QwenConfig
from portable_dit.models.h3_image.tokens import TEXT_TAG, WordPiece, piece_ids
from portable_dit.ops import Attention, HeadNormRotary, RMSNorm, Rotary, SwiGLU


@dataclass(frozen=True)
class Conditioning:
    """What the transformer is told.

    states: [L, text_dim] in the encoder's dtype. tags: int64 [L], 1 for words, 0 for rows seen in a picture.
    """

    states: Tensor
    tags: Tensor


class TextAttention(nn.Module):
    """Causal attention with normalised queries and keys, and as many key heads as the config says."""

    def __init__(self, config: TextConfig | QwenConfig) -> None:
        super().__init__()
        inner, keys = (
            count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.q_norm = HeadNormRotary(config.head_dim, config.rms_norm_eps)
        self.k_norm = HeadNormRotary(config.head_dim, config.rms_norm_eps)
        self.attend = Attention(
            config.num_attention_heads, config.head_dim, num_kv_heads=config.num_key_value_heads
        )

    def forward(self, x: Tensor, rotary: Rotary, mask: Mask) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), rotary)  # [B, L, N, D]
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), rotary)  # [B, L, N, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # [B, L, N, D]
        out: Tensor = self.o_proj(self.attend(q, k, v, mask).flatten(2))
        return out


class TextMLP(nn.Module):
    """Gated feed-forward with Qwen3's names."""

    def __init__(self, config: TextConfig | QwenConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.down_proj = nn.Linear(config.ffn_size, config.hidden_size, bias=False)
        self.act = SwiGLU()

    def forward(self, x: Tensor) -> Tensor:
        gate_value = torch.cat([self.gate_proj(x), self.up_proj(x)], dim=-1)
        out: Tensor = self.down_proj(self.act(gate_value))
        return out


class TextLayer(nn.Module):
    """One Qwen3-style decoder layer."""

    def __init__(self, config: TextConfig | QwenConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = TextAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = TextMLP(config)

    def forward(self, x: Tensor, rotary: Rotary, mask: Mask) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MiniTextEncoder(nn.Module):
    """Word table, projection and causal layers: token ids int64 [B, L] -> states [B, L, hidden_size].

    Causal, so what follows a token cannot change its state, and padding on the right is harmless. The states
    are those before any final norm, as the big model takes its own.
    """

    def __init__(self, config: TextConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.table_dim)
        self.embed_proj = nn.Linear(config.table_dim, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(TextLayer(config) for _ in range(config.num_layers))
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed_proj(self.embed_tokens(ids))  # [B, L, C]
        rotary = self._rotary(ids.shape[1], x)
        mask: Mask = NO_MASK if ids.shape[1] == 1 else Causal()
        for layer in self.layers:
            x = layer(x, rotary, mask)
        return x

    def _rotary(self, length: int, like: Tensor) -> Rotary:
        pairs = self.config.head_dim // 2
        exponent = torch.arange(pairs, dtype=torch.float32, device=like.device) / pairs
        positions = torch.arange(length, dtype=torch.float32, device=like.device)
        angles = positions[:, None] * (1.0 / self.config.rope_theta**exponent)  # [L, pairs] float32
        return Rotary(angles.cos().to(like.dtype)[None], angles.sin().to(like.dtype)[None])


class Conditioner:
    """A text encoder with its tokenizer."""

    def __init__(self, encoder: MiniTextEncoder, tokenizer: WordPiece) -> None:
        self.encoder = encoder
        self.tokenizer = tokenizer

    @torch.no_grad()
    def __call__(self, prompt: str, references: Sequence[np.ndarray] = ()) -> Conditioning:
        """This encoder does not see the references; they may have labels. Raises RequestError."""
        ids = piece_ids(prompt, len(references), self.tokenizer, self.encoder.config)
        tokens = torch.tensor([ids], device=self.encoder.embed_tokens.weight.device)
        states = self.encoder(tokens)[0]
        return Conditioning(states, torch.full((len(ids),), TEXT_TAG, device=states.device))
