"""From training sets to the checkpoint that the package ships.

The folder is laid out like any checkpoint of the family. Matrices and filters are int8 rows with float16
scales: the loader expands them, and that expansion *is* the master, so nothing downstream depends on the
training's float32.

    python -m training.export --from RUN --data training/build --out portable_dit/models/h3_mini
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from portable_dit.manifest import make_manifest, verify
from portable_dit.models.h3_image.config import H3Config
from training.checkpoint import encode, load_set
from training.model import mini_config

LIMIT_BYTES = 30_000_000
STUDENT, VAE = "student", "vae"


def split_student(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(text encoder, transformer) tensors under the engine's names."""
    parts: dict[str, dict[str, Tensor]] = {"text_encoder": {}, "transformer": {}}
    for name, tensor in tensors.items():
        owner, _, rest = name.partition(".")
        parts[owner][rest] = tensor
    return parts["text_encoder"], parts["transformer"]


def shipped_config(config: H3Config, note: Mapping[str, list[float]], vocab_size: int) -> H3Config:
    """The config with the trained VAE's latent statistics and the real size of the word table."""
    vae = replace(
        config.vae, latents_mean=tuple(note["latents_mean"]), latents_std=tuple(note["latents_std"])
    )
    return replace(config, vae=vae, text=replace(config.text, vocab_size=vocab_size))


def write_configs(folder: Path, config: H3Config) -> None:
    """model_index.json and the config of each component."""
    index = {
        "_class_name": "H3Mini",
        "_minimax_h3": {"schema_version": 1, "sigma_shift_scales": {"video": config.scheduler.shift}},
        "canvas": config.canvas.to_dict(),
        "transformer": ["portable_dit", "H3Transformer"],
        "vae": ["portable_dit", "ImageVAE"],
        "text_encoder": ["portable_dit", "MiniTextEncoder"],
        "scheduler": ["portable_dit", "FlowMatchEuler"],
    }
    files = {
        "model_index.json": index,
        "transformer/config.json": config.dit.to_dict(),
        "vae/config.json": config.vae.to_dict(),
        "text_encoder/config.json": config.text.to_dict(),
        "scheduler/scheduler_config.json": config.scheduler.to_dict(),
    }
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=2) + "\n")


def export(source: Path, data: Path, out: Path, config: H3Config, *, name: str = STUDENT) -> int:
    """Write the checkpoint folder and verify it.

    Returns its bytes. `name`: the set to ship as the transformer.
    """
    student, _ = load_set(source, name)
    vae, index = load_set(source, VAE)
    table = load_file(data / "text_table.safetensors")
    config = shipped_config(config, index["note"], len(table["embedding.weight"]))
    text, transformer = split_student(student)
    for folder in ("transformer", "vae", "text_encoder", "scheduler"):
        shutil.rmtree(out / folder, ignore_errors=True)
    write_configs(out, config)
    words = {
        "embed_tokens.weight": table["embedding.weight"],
        "embed_tokens.weight_scale": table["embedding.weight_scale"],
    }
    stored = {
        "transformer": encode(transformer, "int8"),
        "vae": encode(vae, "int8"),
        "text_encoder": encode(text, "int8") | words,
    }
    for component, tensors in stored.items():
        save_file(tensors, out / component / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(data / "vocab.txt", out / "text_encoder" / "vocab.txt")
    (out / "manifest.json").write_text(json.dumps(make_manifest(out), indent=1) + "\n")
    return verify(out).bytes


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the shipped checkpoint from a finished training run.")
    parser.add_argument("--from", dest="source", type=Path, required=True, help="folder of a training run")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "build")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", default=STUDENT, help="the weights to ship (default: the six-step student)")
    arguments = parser.parse_args()
    total = export(arguments.source, arguments.data, arguments.out, mini_config(), name=arguments.set)
    print(f"{arguments.out}: {total / 1e6:.2f} MB")
    for path in sorted(p for p in arguments.out.rglob("*") if p.is_file()):
        print(f"{path.stat().st_size:12,}  {path.relative_to(arguments.out)}")
    if total > LIMIT_BYTES:
        raise SystemExit(f"{total:,} bytes: more than the {LIMIT_BYTES:,} that may ship.")


if __name__ == "__main__":
    main()
