"""LoRA adapters on ranks that hold parts of the weights: the picture of one process with the same adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from portable_dit import Engine, Request
from portable_dit.models.h3_image.random_checkpoint import write_random as write_h3
from portable_dit.models.hunyuan_image_3.random_checkpoint import write_random as write_hunyuan
from portable_dit.safetensors_file import stored_tensors

SPLIT = ("qkv_proj", "out_proj", "o_proj", "fc1", "fc2", "gate_and_up_proj", "down_proj")
MODELS = {
    "h3-image": (write_h3, "original", "transformer"),
    "hunyuan-image-3": (write_hunyuan, "instruct", "."),
}
REQUESTS = {
    "h3-image": Request("a red apple", seed=1, size=(192, 128)),
    "hunyuan-image-3": Request("a red apple", seed=1, steps=2, guidance_scale=4.0),
}
LAYOUTS = {
    "h3-image": [
        {"layout.tensor": 2},
        {"layout.ulysses": 2},
        {"layout.tensor": 2, "offload.dit": "layerwise"},
    ],
    "hunyuan-image-3": [{"layout.tensor": 2, "layout.expert": 2}, {"layout.guidance": 2}],
}


def write_adapter(path: Path, stored: dict[str, tuple[int, ...]]) -> None:
    """Of every layer that ranks divide, large enough to be seen."""
    generator, matrices = torch.Generator().manual_seed(0), {}
    for name, (rows, columns) in stored.items():
        down = torch.randn(4, columns, generator=generator) * columns**-0.5
        layer = name.removesuffix(".weight")
        matrices[f"{layer}.lora_A.weight"] = 0.2 * down
        matrices[f"{layer}.lora_B.weight"] = torch.randn(rows, 4, generator=generator)
    save_file(matrices, path)


@pytest.fixture(params=MODELS)
def drawn(request, tmp_path) -> tuple[str, Callable[[dict[str, object]], np.ndarray]]:
    """A model, and what draws with it and an adapter, "lora": [] for none."""
    write, dialect, folder = MODELS[request.param]
    write(tmp_path / "model", config="tiny", dialect=dialect, seed=0)
    shapes = {
        name: tensor.shape
        for name, tensor in stored_tensors(tmp_path / "model" / folder).items()
        if name.startswith(("blocks.", "model.layers.")) and name.removesuffix(".weight").endswith(SPLIT)
    }
    write_adapter(tmp_path / "style.safetensors", {n: s for n, s in shapes.items() if len(s) == 2})
    recipe = tmp_path / "recipe.yaml"
    words = {"model": request.param, "weights": tmp_path / "model", "precision": "float32"}
    recipe.write_text("".join(f"{key}: {word}\n" for key, word in words.items()), encoding="utf-8")

    def draw(keys: dict[str, object]) -> np.ndarray:
        with Engine.load(recipe, {"lora": [str(tmp_path / "style.safetensors")], **keys}) as engine:
            return engine.generate(REQUESTS[request.param]).images[0].pixels.astype(int)

    return request.param, draw


def test_two_ranks_draw_with_an_adapter_what_one_draws(drawn):
    model, draw = drawn
    alone = draw({})
    assert np.abs(alone - draw({"lora": []})).mean() > 4, "or there is nothing to see of it"
    for layout in LAYOUTS[model]:
        assert np.abs(draw(layout) - alone).max() <= 1, layout
