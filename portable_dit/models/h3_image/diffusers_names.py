"""diffusers' names for the tensors of the transformer and the VAE: one table for each, read both ways.

Ours are the original checkpoint's. What is more than a name (queries, keys and values apart, halves of gated
layers exchanged) is done by those who read and write the tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import count


@dataclass(frozen=True)
class Names:
    """parts: what differs, ours and theirs; ^ begins a name, $ ends it, # is a number.

    fused: our layer of queries, keys and values, which they keep as attn.to_q, attn.to_k and attn.to_v.
    gated: our layer whose halves they have the other way round.
    """

    parts: tuple[tuple[str, str], ...]
    fused: str
    gated: str

    def ours(self, theirs: str) -> str:
        """Our name for a tensor of theirs; one that the table does not know stays as it is."""
        for our_part, their_part in self.parts:
            theirs = _replaced(theirs, their_part, our_part)
        return theirs

    def theirs(self, ours: str) -> str:
        """Their name for a tensor of ours."""
        for our_part, their_part in self.parts:
            ours = _replaced(ours, our_part, their_part)
        return ours


DIT_NAMES = Names(
    parts=(
        ("^video_patch_proj.", "^proj_in."),
        ("^condition_proj.", "^context_embedder."),
        ("^time_embedder.proj_in.", "^time_embedder.linear_1."),
        ("^time_embedder.proj_out.", "^time_embedder.linear_2."),
        ("^adaln_t_table$", "^time_embedder.table$"),
        ("^token_refiner.blocks.", "^token_refiner.refiner_blocks."),
        ("^blocks.", "^transformer_blocks."),
        ("^final_layer.norm.", "^norm_out.norm."),
        ("^final_layer.adaln_proj.linear.", "^norm_out.linear."),
        ("^final_layer.video_out.", "^proj_out."),
        (".attn.q_norm.", ".attn.norm_q."),
        (".attn.k_norm.", ".attn.norm_k."),
        (".attn.out_proj.", ".attn.to_out.0."),
        (".mlp.fc1.", ".ff.net.0.proj."),
        (".mlp.fc2.", ".ff.net.2."),
    ),
    fused="attn.qkv_proj",
    gated="mlp.fc1",
)
VAE_NAMES = Names(
    parts=(
        ("^encoder.down.#.block.#.", "^encoder.down_blocks.#.resnets.#."),
        (".nin_shortcut.", ".conv_shortcut."),
        ("^encoder.down.#.downsample.", "^encoder.down_blocks.#.downsamplers.0."),
        ("^decoder.x_embedder.", "^decoder.proj_in."),
        (".attn.to_out.", ".attn.to_out.0."),
        (".ff.w1.", ".ff.net.0.proj."),
        (".ff.w2.", ".ff.net.2."),
    ),
    fused="attn.to_qkv",
    gated="ff.w1",
)


def _replaced(name: str, found: str, put: str) -> str:
    pattern, replacement = _rule(found, put)
    return pattern.sub(replacement, name)


@lru_cache
def _rule(found: str, put: str) -> tuple[re.Pattern[str], str]:
    """The two notations of a part as a pattern and what stands for it."""
    pattern = re.escape(found).replace(r"\^", "^").replace(r"\$", "$").replace(r"\#", r"(\d+)")
    numbers = count(1)
    return re.compile(pattern), re.sub("#", lambda mark: rf"\{next(numbers)}", put).strip("^$")
