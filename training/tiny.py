"""A toy world for trying the whole chain on a CPU: twelve drawn shapes in three styles, and their words."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from portable_dit.evaluation.builtin.scenes import STYLES
from training.render import Atlas
from training.scenes import EDIT_MIX, T2I_MIX, THREE_MIX, TWO_MIX, Concepts, sample_records

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def make_toy_data(folder: Path, *, table_dim: int) -> None:
    """Write concepts.json, vocab.txt and text_table.safetensors for the toy concepts."""
    folder.mkdir(parents=True, exist_ok=True)
    concepts = toy_concepts()
    (folder / "concepts.json").write_text(json.dumps(as_data(concepts)))
    rng = random.Random(0)
    words: set[str] = set()
    for mix in (T2I_MIX, EDIT_MIX, TWO_MIX, THREE_MIX):
        for record in sample_records(rng, 2000, concepts, mix=mix):
            text = record.caption.lower()
            words.update("".join(c if c.isalnum() else f" {c} " for c in text).split())
    pieces = [*SPECIAL, *sorted(words)]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    torch.manual_seed(0)
    table = torch.randint(-127, 128, (len(pieces), table_dim), dtype=torch.int8)
    save_file(
        {"embedding.weight": table, "embedding.weight_scale": torch.full((len(pieces),), 0.01).half()},
        folder / "text_table.safetensors",
    )


def toy_concepts() -> Concepts:
    """The example concepts, with two held out in each style and two pairs."""
    example = Concepts.example()
    held_out = tuple((2 * style, 2 * style + 1) for style in range(len(STYLES)))
    everything = range(len(example))
    return replace(
        example,
        held_out=held_out,
        allowed=tuple(tuple(c for c in everything if c not in hidden) for hidden in held_out),
        held_out_pairs=frozenset({(7, 8), (9, 10)}),
    )


def as_data(concepts: Concepts) -> dict:
    """The content of concepts.json."""
    entries = []
    for i, names in enumerate(concepts.names):
        held_out = next((s for s in range(len(STYLES)) if i in concepts.held_out[s]), None)
        entries.append(
            {
                "names": [name._asdict() for name in names],
                "countable": concepts.countable[i],
                "plural": concepts.plural[i],
                "asymmetry": list(concepts.asymmetry[i]),
                "held_out_style": held_out,
            }
        )
    return {"concepts": entries, "held_out_pairs": sorted(concepts.held_out_pairs)}


def toy_atlas(count: int, *, side: int = 64) -> Atlas:
    """Coloured ellipses, one for each concept, drawn differently for each style."""
    generator = torch.Generator().manual_seed(1)
    axis = torch.linspace(-1, 1, side)
    sprites = []
    for _ in range(count):
        stretch = 0.5 + torch.rand(2, generator=generator)
        color = torch.rand(3, 1, 1, generator=generator)
        radius = (axis[:, None] * stretch[0]) ** 2 + (axis[None] * stretch[1]) ** 2
        for style in range(len(STYLES)):
            inside = (radius < 0.8).float()[None]
            shade = (1 - 0.4 * style * radius).clamp(0, 1)[None]
            sprites.append(torch.cat([color * shade * inside, inside]))
    return Atlas((torch.stack(sprites) * 255).round().to(torch.uint8))
