"""Training sets from the checkpoint that the package ships, for a run whose own files are lost.

The VAE comes back as it is, with its latent statistics. The transformer is the six-step student: its trunk
and its undistilled head start the flow matching again, and its distilled heads are made anew afterwards.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from training.checkpoint import decode, save_set

WORD_TABLE = "embed_tokens.weight"  # frozen, not part of sets


def sets_from_shipped(shipped: Path, out: Path, *, judge: Path | None = None) -> None:
    """Write the sets "vae" and "dit" to `out` from a checkpoint folder like portable_dit/models/h3_mini.

    judge: weights of the judge to take along; without it, the chain trains one beside.
    """
    out.mkdir(parents=True, exist_ok=True)
    if judge is not None and judge.exists():
        shutil.copyfile(judge, out / "judge.safetensors")
    config = json.loads((shipped / "vae" / "config.json").read_text())
    statistics = {key: config[key] for key in ("latents_mean", "latents_std")}
    vae = decode(load_file(shipped / "vae" / "model.safetensors"))
    save_set(out, "vae", vae, step=0, note={"done": True, "samples": 0, "from": "shipped"} | statistics)
    tensors: dict[str, torch.Tensor] = {}
    for component in ("text_encoder", "transformer"):
        stored = decode(load_file(shipped / component / "model.safetensors"))
        tensors |= {f"{component}.{name}": value for name, value in stored.items() if name != WORD_TABLE}
    note = {"stage": "dit256", "done": True, "samples": 0, "from": "shipped"}
    save_set(out, "dit", tensors, step=0, note=note)
