"""The judge: a small CNN that says what a picture of h3-mini's world shows.

It reads 64 x 64 pixels and answers in two slots: the left (else upper) object and the right (else lower) one.
For one object, and for several of one kind, both slots answer the same. It learned from real scenes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from portable_dit.evaluation.builtin.scenes import LARGE, STYLES, Scene

LAYOUTS = (
    "empty",
    "one large",
    "one medium",
    "side by side",
    "above each other",
    "diagonal",
    "three",
    "four",
)
SIDE = 64
UNKNOWN = -100  # cross entropy ignores it


class Block(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(inner)))


class Judge(nn.Module):
    """Pictures float [B, 3, 64, 64] in 0..1 -> logits: layout [B, 8], concept [B, 2, K], style [B, 2, 3]."""

    def __init__(self, num_concepts: int, widths: tuple[int, int, int] = (32, 76, 152)):
        super().__init__()
        stages: list[nn.Module] = []
        previous = 3
        for width in widths:
            stages += [
                nn.Conv2d(previous, width, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                Block(width),
            ]
            previous = width
        self.trunk = nn.Sequential(*stages, Block(previous))  # [B, C, 8, 8]
        self.context = nn.Linear(previous * 4, previous)
        self.position = nn.Parameter(torch.zeros(previous, 8, 8))
        self.attention = nn.Sequential(nn.Conv2d(previous, 64, 1), nn.ReLU(), nn.Conv2d(64, 2, 1))
        self.layout = nn.Sequential(nn.Linear(previous * 4, 128), nn.ReLU(), nn.Linear(128, len(LAYOUTS)))
        self.slot = nn.Sequential(nn.Linear(previous, 256), nn.ReLU())
        self.concept = nn.Linear(256, num_concepts)
        self.style = nn.Linear(256, len(STYLES))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.trunk(images * 2 - 1)  # [B, C, 8, 8]
        quarters = F.adaptive_avg_pool2d(features, 2).flatten(1)  # [B, 4C]
        guided = F.relu(features + self.context(quarters)[:, :, None, None] + self.position)
        weights = self.attention(guided).flatten(2).softmax(dim=2)  # [B, 2, 64]
        slots = self.slot(weights @ features.flatten(2).transpose(1, 2))  # [B, 2, 256]
        return self.layout(quarters), self.concept(slots), self.style(slots)


@dataclass(frozen=True)
class Labels:
    """What a picture shows. layout: int64 [B]; concepts, styles: int64 [B, 2], UNKNOWN without an object."""

    layout: Tensor
    concepts: Tensor
    styles: Tensor


def label(scenes: Sequence[Scene]) -> Labels:
    """The right answers for scenes that `training.scenes` can make a record of."""
    layouts, concepts, styles = [], [], []
    for scene in scenes:
        objects = sorted(scene.objects, key=lambda placed: (placed.x, placed.y))
        layouts.append(layout_of(scene))
        if objects:
            two = (objects[0], objects[-1])
            concepts.append([placed.concept for placed in two])
            styles.append([placed.style for placed in two])
        else:
            concepts.append([UNKNOWN, UNKNOWN])
            styles.append([UNKNOWN, UNKNOWN])
    return Labels(torch.tensor(layouts), torch.tensor(concepts), torch.tensor(styles))


def layout_of(scene: Scene) -> int:
    objects = scene.objects
    if len(objects) != 2:
        return (0, 1 if objects and objects[0].size == LARGE else 2, -1, 6, 7)[len(objects)]
    if objects[0].y == objects[1].y:
        return 3
    return 4 if objects[0].x == objects[1].x else 5


def shrink(images: Tensor) -> Tensor:
    """Pictures of any size as the judge wants them, float32 [B, 3, 64, 64]."""
    return F.adaptive_avg_pool2d(images.float(), SIDE)


@torch.no_grad()
def judge_images(judge: Judge, images: Tensor, chunk: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    """Layout, concept and style logits of pictures float [B, 3, H, W], float32 on the CPU."""
    device = next(judge.parameters()).device
    parts = [judge(shrink(part.to(device))) for part in torch.split(images, chunk)]
    layout, concept, style = (torch.cat(outputs).float().cpu() for outputs in zip(*parts, strict=True))
    return layout, concept, style


def load_judge(path: str | Path, device: str | torch.device = "cpu") -> Judge:
    """A judge in float32, ready to answer."""
    tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
    first, second, third = (len(tensors[f"trunk.{layer}.weight"]) for layer in (0, 4, 8))
    judge = Judge(len(tensors["concept.weight"]), (first, second, third))
    counters = {name: value for name, value in judge.state_dict().items() if not value.ndim}
    judge.load_state_dict(tensors | counters)
    return judge.eval().to(device)
