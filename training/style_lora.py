"""A LoRA of h3-mini, trained on a CPU in a few minutes: everything stands on a pink background.

The model teaches itself. Where it is asked for "an owl", the adapter has it give the velocity that it gives
without an adapter for "an owl on a pink background", at the latents which that prompt leads through.

    python -m training.style_lora --out tests/data/lora/pink.safetensors

Letters: N out features, K in features, R rank.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from portable_dit.models.h3_image.model import H3Denoiser, H3Image
from portable_dit.sampling import denoise, draw_noise
from training.branch_check import Wish, load, prepare

STYLE = " on a pink background"
THINGS = (
    "owl", "red apple", "fox", "penguin", "blue car", "tree", "house", "guitar", "yellow banana", "whale",
    "rocket", "mushroom", "bicycle", "frog", "cake", "clock", "green hat", "lion", "sailboat", "rose",
    "robot", "snail", "cactus", "purple umbrella", "horse", "pizza", "key", "turtle", "drum", "bee",
)  # fmt: skip
LAYERS = ("attn.qkv_proj", "mlp.fc2")
SIZE, STEPS, RANK = (256, 256), 6, 4


class LowRank(nn.Module):
    """A weight [N, K] with an adapter on it, which begins at nothing."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(torch.randn(RANK, columns) * columns**-0.5)
        self.up = nn.Parameter(torch.zeros(rows, RANK))
        self.on = True

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down if self.on else weight


def velocity(denoiser: H3Denoiser, latents: Tensor, step: int) -> Tensor:
    hidden, arguments = denoiser.embed(latents, step)
    for block in denoiser.blocks:
        hidden = block(hidden, *arguments)
    return denoiser.head(hidden, step)


@torch.no_grad()
def lesson(model: H3Image, thing: str, seed: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(step, latents, velocity) of a picture in the style, as the model draws it by itself."""
    teacher, schedule = prepare(model, Wish(f"{thing}{STYLE}", size=SIZE, seed=seed)), model.schedule(STEPS)
    seen = [draw_noise((1, *model.latent_shape(*SIZE)), seed)]
    denoise([teacher], seen[:1], schedule, on_step=lambda done, latents: seen.append(latents[0].clone()))
    for step in range(STEPS):
        yield step, seen[step], velocity(teacher, seen[step], step)


def train(model: H3Image, pictures: int, rate: float) -> dict[str, LowRank]:
    adapters: dict[str, LowRank] = {}
    for name, layer in model.dit.blocks.named_modules():
        if name.endswith(LAYERS):
            assert isinstance(layer, nn.Linear)
            adapters[f"blocks.{name}"] = LowRank(layer.weight)
            parametrize.register_parametrization(layer, "weight", adapters[f"blocks.{name}"])
    weights = [parameter for adapter in adapters.values() for parameter in adapter.parameters()]
    optimizer = torch.optim.Adam(weights, lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=pictures)
    chance, loss_seen = random.Random(0), 0.0  # of the last 50 steps or so
    for picture in range(pictures):
        thing, seed = f"a {chance.choice(THINGS)}", chance.randrange(1 << 30)
        for adapter in adapters.values():
            adapter.on = False
        steps = list(lesson(model, thing, seed))
        for adapter in adapters.values():
            adapter.on = True
        student = prepare(model, Wish(thing, size=SIZE, seed=seed))
        optimizer.zero_grad()
        for step, latents, wanted in steps:
            loss = (velocity(student, latents, step) - wanted).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            loss_seen += 0.02 * (loss.item() - loss_seen)
        optimizer.step()
        schedule.step()
        if picture % 25 == 0:
            print(f"{picture:4} pictures  loss {loss_seen:.4f}", flush=True)
    return adapters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pictures", type=int, default=400)
    parser.add_argument("--rate", type=float, default=1e-3)
    given = parser.parse_args()
    torch.manual_seed(0)
    adapters = train(load({"precision": "float32"}), given.pictures, given.rate)
    tensors: dict[str, Tensor] = {}
    for name, adapter in adapters.items():
        tensors[f"{name}.lora_A.weight"] = adapter.down.detach().bfloat16()
        tensors[f"{name}.lora_B.weight"] = adapter.up.detach().bfloat16()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, given.out)


if __name__ == "__main__":
    main()
