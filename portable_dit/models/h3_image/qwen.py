"""The text encoder of H3-Image: Qwen3-VL's vision tower and its first 50 decoder layers.

The tower and the rotary embedding are transformers' own modules; the tower's attention goes through our
seam, by the hook transformers has for other attention functions. The layers are those of `text`, with seams
of their own: a prompt has few tokens, and launching small kernels took four times as long as reading the
weights. There is no final norm and no word head, and only the layers are read that a state needs.

transformers takes seconds to import, so this file is imported when such an encoder is built, and only then.

Letters: L tokens, P patches, V rows that pictures take in the text, N heads, D head_dim, H W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig, Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextRotaryEmbedding,
    Qwen3VLVisionModel,
    Qwen3VLVisionRotaryEmbedding,
)

from portable_dit.masks import NO_MASK, Causal, Mask
from portable_dit.models.h3_image.qwen_config import QwenConfig
from portable_dit.models.h3_image.text import Conditioning, TextLayer
from portable_dit.models.h3_image.tokens import QwenTokenizer, present
from portable_dit.ops import Attention, Rotary

SEAM = "portable_dit"


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it: [B, N, S, D] in, [B, S, N, D] out."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))  # [B, S, N, D]
    mask: Mask = Causal() if module.is_causal and q.shape[1] > 1 else NO_MASK
    seam = module.seam
    assert isinstance(seam, Attention)
    return seam(q, k, v, mask), None


class QwenEncoder(nn.Module):
    """Token ids and patches -> the state behind the last layer that is used, before any norm."""

    def __init__(self, config: QwenConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        AttentionInterface.register(SEAM, _attend)
        self.config = config
        text = Qwen3VLTextConfig(**{**config.text_dict(), "num_hidden_layers": config.used_layers})
        vision = Qwen3VLVisionConfig(**config.vision_dict())
        vision._attn_implementation = SEAM
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TextLayer(config) for _ in range(config.used_layers))
        self.visual = Qwen3VLVisionModel(vision)
        for block in self.visual.blocks:
            attention = cast(nn.Module, block.attn)
            attention.seam = Attention(config.vision.num_heads, config.vision.head_dim)
        self.to(dtype)
        self.eval()
        # Frequencies are in no file, so they must not be left on the meta device with the weights.
        with torch.device("cpu"):
            self.visual.rotary_pos_emb = Qwen3VLVisionRotaryEmbedding(vision)
            self.rotary_emb = Qwen3VLTextRotaryEmbedding(text)

    def forward(
        self, ids: Tensor, positions: Tensor, pads: Tensor, pixels: Tensor | None, grids: Tensor
    ) -> Tensor:
        """The states [L, hidden_size].

        ids: int64 [L]. positions: int64 [3, L]. pads: bool [L], V of them True. pixels: the patches of all
        pictures, [P, ...], None without any. grids: int64 [pictures, 3], (1, patches down, patches across).
        """
        x: Tensor = self.embed_tokens(ids)  # [L, C]
        features: Sequence[Tensor] = ()
        if pixels is not None:
            seen = self.visual(pixels.to(x.dtype), grid_thw=grids)
            x = x.index_put((pads,), seen.pooler_output.to(x.dtype))
            features = seen.deepstack_features
        x = x[None]
        pairs = self.config.head_dim // 2  # transformers gives each angle twice
        angles = self.rotary_emb(x, positions[:, None])
        rotary = Rotary(*(both[..., :pairs].contiguous() for both in angles))  # once, and not in each layer
        mask: Mask = Causal() if x.shape[1] > 1 else NO_MASK
        for depth, layer in enumerate(self.layers):
            x = layer(x, rotary, mask)
            if depth < len(features):  # what the tower saw half-way is added behind the first layers
                x = x.clone()
                x[0, pads] = x[0, pads] + features[depth]
        return x[0]


class QwenConditioner:
    """The big text encoder with its tokenizer."""

    def __init__(self, encoder: QwenEncoder, tokenizer: QwenTokenizer) -> None:
        self.encoder = encoder
        self.tokenizer = tokenizer

    @torch.no_grad()
    def __call__(self, prompt: str, references: Sequence[np.ndarray] = ()) -> Conditioning:
        """references: uint8 RGB [H, W, 3] each, at the model's size. Raises RequestError for a bad prompt."""
        config, device = self.encoder.config, self.encoder.embed_tokens.weight.device
        sizes = [config.vision_size(picture.shape[1], picture.shape[0]) for picture in references]
        shown = present(prompt, sizes, self.tokenizer, config)
        merge = config.vision.merge_size
        grids = torch.tensor([(1, merge * down, merge * across) for down, across in shown.grids])
        pixels = [patches(picture, config) for picture in references]
        states = self.encoder(
            torch.from_numpy(shown.ids).to(device),
            torch.from_numpy(shown.positions).to(device),
            torch.from_numpy(shown.pads).to(device),
            torch.cat(pixels).to(device) if pixels else None,
            grids.to(device),
        )
        return Conditioning(states, torch.from_numpy(shown.tags))


def patches(picture: np.ndarray, config: QwenConfig) -> Tensor:
    """A picture uint8 RGB [H, W, 3] as the vision tower takes it: float32 [P, values].

    values: channels * time * patch * patch. Patches that make one row of the text stand together. The tower's
    kernels span `temporal_patch_size` frames, so a still picture is given that often.
    """
    vision, wanted = config.vision, config.vision_size(picture.shape[1], picture.shape[0])
    if (picture.shape[1], picture.shape[0]) != wanted:
        picture = _resized(picture, wanted)
    mean, std = (
        torch.tensor(v)[:, None, None] for v in (config.processor.image_mean, config.processor.image_std)
    )
    x = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255  # [C, H, W]
    x = (x - mean) / std
    patch, merge = vision.patch_size, vision.merge_size
    rows, columns = x.shape[1] // vision.row_side, x.shape[2] // vision.row_side
    x = x.reshape(-1, rows, merge, patch, columns, merge, patch)
    x = x.permute(1, 4, 2, 5, 0, 3, 6)  # [rows, columns, merge, merge, C, patch, patch]
    x = x.unsqueeze(5).expand(-1, -1, -1, -1, -1, vision.temporal_patch_size, -1, -1)
    return x.reshape(rows * columns * merge**2, -1)  # [P, C * time * patch * patch]


def _resized(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC))
