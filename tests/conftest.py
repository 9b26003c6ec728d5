"""What tests share: a checkpoint of the H3 family with random weights, that draws in a blink."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from PIL import Image
from plugin_shelf import Shelf

from portable_dit import Engine

# What these compare with, diffusers 0.42.1, needs Python 3.11; the package itself does not.
collect_ignore_glob = [] if sys.version_info >= (3, 11) else ["parity/*", "integration/test_h3_end_to_end.py"]

# How long an example takes says something about who else uses the machine, nothing about the code.
settings.register_profile("suite", deadline=None, suppress_health_check=(HealthCheck.too_slow,))
settings.load_profile("suite")

# Tests run in several processes, and one thread each is the fastest for shapes as small as theirs. The same
# goes for processes that they start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would every process they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

WORDS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "red",
    "green",
    "apple",
    "on",
    "blue",
    "make",
    "it",
    "the",
)


def make_tiny_checkpoint(folder: Path, *, seed: int = 0, **canvas: int) -> Path:
    """A folder laid out like a real checkpoint: configs, word list, random weights, some in 8 bits."""
    from portable_dit.manifest import make_manifest
    from portable_dit.models.h3_image.config import (
        CanvasConfig,
        DiTConfig,
        H3Config,
        SchedulerConfig,
        TextConfig,
        VAEConfig,
    )

    sides = {
        "min_side": 64,
        "max_side": 512,
        "max_pixels": 256 * 256,
        "default_width": 96,
        "default_height": 64,
    }
    config = replace(
        H3Config(),
        dit=DiTConfig(
            hidden_size=64,
            num_layers=3,
            token_refiner_num_layers=1,
            num_attention_heads=2,
            attention_head_dim=32,
            ffn_hidden_size=96,
            latents_dim=8,
            text_dim=48,
            timestep_input_dim=16,
            time_embed_hidden_size=32,
            time_embed_dim=32,
            rope_inv_freq_len=4,
            pdd_heads=6,
        ),
        vae=VAEConfig(
            latent_channels=8,
            block_out_channels=(8, 8, 16, 16, 16),
            layers_per_block=1,
            downsample_stages=4,
            norm_num_groups=4,
            decoder_hidden_size=32,
            decoder_num_layers=2,
            decoder_num_attention_heads=2,
            decoder_attention_head_dim=16,
            latents_mean=(0.0,) * 8,
            latents_std=(1.0,) * 8,
        ),
        text=TextConfig(vocab_size=len(WORDS), table_dim=16, hidden_size=48, num_layers=2, ffn_size=64),
        scheduler=SchedulerConfig(reference_rule="canvas", max_references=3),
        canvas=CanvasConfig(**{**sides, "max_ratio": 2.0, "max_prompt_characters": 400, **canvas}),
    )
    for part in ("transformer", "vae", "text_encoder", "scheduler"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps({"canvas": config.canvas.to_dict()}))
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config.scheduler.to_dict()))
    (folder / "text_encoder" / "vocab.txt").write_text("\n".join(WORDS))
    generator = torch.Generator().manual_seed(seed)
    for part, module, own in _modules(config):
        (folder / part / "config.json").write_text(json.dumps(own.to_dict()))
        _save_random(module, folder / part / "model.safetensors", generator)
    (folder / "manifest.json").write_text(json.dumps(make_manifest(folder)))
    return folder


def _modules(config):
    from portable_dit.models.h3_image.dit import H3Transformer
    from portable_dit.models.h3_image.text import MiniTextEncoder
    from portable_dit.models.h3_image.vae import ImageVAE

    yield "transformer", H3Transformer(config.dit), config.dit
    yield "vae", ImageVAE(config.vae), config.vae
    yield "text_encoder", MiniTextEncoder(config.text), config.text


def _save_random(module, path: Path, generator) -> None:
    """Every parameter at random with activations kept near one; large matrices as int8 rows with scales."""
    from safetensors.torch import save_file

    state = {}
    for name, tensor in module.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        fan_in = tensor[0].numel() if tensor.ndim > 1 else 1
        near_one = tensor.ndim == 1 and not name.endswith("bias")
        value = 1 + 0.2 * noise if near_one else noise * (0.3 if fan_in == 1 else fan_in**-0.5)
        if tensor.ndim == 2 and "blocks" in name:
            scale = value.abs().amax(dim=1) / 127
            state[name] = (value / scale[:, None]).round().to(torch.int8)
            state[f"{name}_scale"] = scale.half()
        else:
            state[name] = value.contiguous()
    save_file(state, path)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """The folder of a tiny checkpoint; treat it as read-only."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def make_checkpoint():
    """`make_tiny_checkpoint`, for tests that want one of their own."""
    return make_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_recipe(tiny_checkpoint: Path) -> Path:
    """A recipe file for the tiny checkpoint on the CPU, in float32."""
    return _recipe_for(tiny_checkpoint)


@pytest.fixture(scope="module")
def engine(tiny_recipe: Path) -> Iterator[Engine]:
    """An engine with the tiny checkpoint, for the tests of one file."""
    with Engine.load(tiny_recipe) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def batching(tiny_recipe: Path) -> Iterator[Engine]:
    """Another one, which draws up to four pictures side by side."""
    with Engine.load(tiny_recipe, {"batch": 4}) as loaded:
        yield loaded


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    """A picture to edit, 96 x 64."""
    path = tmp_path / "reference.png"
    down, across = np.mgrid[0:64, 0:96]
    Image.fromarray(np.stack([down * 3, across * 2, down + across], -1).astype(np.uint8)).save(path)
    return path


@pytest.fixture(scope="session")
def make_slow_recipe(tmp_path_factory) -> Callable[..., Path]:
    """Makes recipes whose largest picture, many at once, takes long enough to be stopped in the middle."""

    def make(*, batch: int = 1) -> Path:
        folder = tmp_path_factory.mktemp("slow")
        return _recipe_for(make_tiny_checkpoint(folder, max_side=1024, max_pixels=512 * 512), batch=batch)

    return make


def _recipe_for(checkpoint: Path, *, batch: int = 1) -> Path:
    path = checkpoint.parent / f"{checkpoint.name}.yaml"
    text = f"model: h3-mini\nweights: {checkpoint}\ndevice: {{backend: cpu}}\nprecision: float32\n"
    path.write_text(text + (f"batch: {batch}\n" if batch > 1 else ""))
    return path


@pytest.fixture(scope="session")
def cli():
    """The command line in this process: cli("run", ...) -> result with exit_code, stdout and stderr."""
    from typer.testing import CliRunner

    from portable_dit.cli import app

    runner = CliRunner()

    def call(*arguments: object, stdin: bytes | None = None):
        return runner.invoke(app, [str(a) for a in arguments], input=stdin, catch_exceptions=False)

    return call


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """An empty shelf of plugins, for the length of a test."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return Shelf(folder, name=tmp_path.name)
