"""The judge: a small CNN that says what a picture of our world shows. It learns from real scenes only.

It reads 64 x 64 pixels and answers in two slots: the left (else upper) object and the right (else lower) one.
For one object, and for several of one kind, both slots answer the same. Train it with

    python -m training.judge --minutes 1.5 --out training/build/judge.safetensors
"""

import argparse
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from training.render import Atlas, render
from training.scenes import (
    DEFAULT_MIX,
    LARGE,
    STYLES,
    Concepts,
    RenderPlan,
    Scene,
    plan_render,
    sample_records,
)

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
RENDER_SIDE = 128
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
    parts = [judge(shrink(part.to(device))) for part in images.split(chunk)]
    layout, concept, style = (torch.cat(outputs).float().cpu() for outputs in zip(*parts, strict=True))
    return layout, concept, style


def save_judge(judge: Judge, path: str | Path) -> None:
    tensors = {name: tensor.half().contiguous() for name, tensor in judge.state_dict().items() if tensor.ndim}
    save_file(tensors, path)


def load_judge(path: str | Path, device: str | torch.device = "cpu") -> Judge:
    """A judge in float32, ready to answer."""
    tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
    widths = (tensors["trunk.0.weight"], tensors["trunk.4.weight"], tensors["trunk.8.weight"])
    judge = Judge(len(tensors["concept.weight"]), tuple(len(weight) for weight in widths))
    counters = {name: value for name, value in judge.state_dict().items() if not value.ndim}
    judge.load_state_dict(tensors | counters)
    return judge.eval().to(device)


Batch = tuple[RenderPlan, np.ndarray, np.ndarray, np.ndarray]
"""Scenes to draw and their labels: layout, concepts, styles. NumPy, so that it travels between processes."""


def make_batch(seed: int, size: int, concepts: Concepts) -> Batch:
    """Random scenes of every kind, held-out combinations included: the judge has to know them all."""
    rng = random.Random(seed)
    records = sample_records(rng, size - size // 6, concepts, DEFAULT_MIX)
    records += sample_records(rng, size // 6, concepts, DEFAULT_MIX, split="heldout")
    scenes = [record.target for record in records]
    labels = label(scenes)
    return plan_render(scenes), labels.layout.numpy(), labels.concepts.numpy(), labels.styles.numpy()


def batches(
    size: int, concepts: Concepts, workers: int, first_seed: int
) -> Iterator[tuple[RenderPlan, Labels]]:
    """Endless batches, made ahead of time by `workers` processes (0: here and now)."""
    if not workers:
        while True:
            yield make_batch(first_seed, size, concepts)
            first_seed += 1
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(make_batch, first_seed + i, size, concepts) for i in range(3 * workers)]
        while True:
            first_seed += 1
            waiting.append(pool.submit(make_batch, first_seed + 3 * workers, size, concepts))
            yield waiting.pop(0).result()


def degrade(images: Tensor) -> Tensor:
    """Half as they are, half shifted, blurred, noisy, JPEG-like. float32 [B, 3, 128, 128] -> 64 x 64."""
    count, device = len(images), images.device
    shift_y, shift_x = (int(v) for v in torch.randint(0, 9, (2,)))
    padded = F.pad(images, (4, 4, 4, 4), mode="replicate")
    bad = F.avg_pool2d(padded[:, :, shift_y : shift_y + RENDER_SIDE, shift_x : shift_x + RENDER_SIDE], 2)
    sigma = float(torch.rand(())) * 1.3 + 0.2
    steps = torch.arange(-4, 5, device=device, dtype=torch.float32)
    kernel = torch.exp(-steps.square() / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).expand(3, 1, 1, 9)
    bad = F.conv2d(F.pad(bad, (4, 4, 0, 0), mode="replicate"), kernel, groups=3)
    bad = F.conv2d(F.pad(bad, (0, 0, 4, 4), mode="replicate"), kernel.transpose(2, 3), groups=3)
    gain = 1 + 0.2 * (torch.rand(count, 3, 1, 1, device=device) - 0.5)
    bad = bad * gain + 0.1 * (torch.rand(count, 1, 1, 1, device=device) - 0.5)
    bad = quantize_blocks(bad, step=0.02 + 0.25 * float(torch.rand(())) ** 2)
    bad = bad + torch.randn_like(bad) * 0.06 * torch.rand(count, 1, 1, 1, device=device)
    keep = torch.rand(count, 1, 1, 1, device=device) < 0.5
    return torch.where(keep, F.avg_pool2d(images, 2), bad.clamp(0, 1))


def quantize_blocks(images: Tensor, step: float) -> Tensor:
    """What JPEG does to a picture: 8 x 8 cosine coefficients rounded, the finer ones more coarsely."""
    n = torch.arange(8, device=images.device, dtype=torch.float32)
    basis = torch.cos((2 * n[None, :] + 1) * n[:, None] * torch.pi / 16) * 0.5
    basis[0] *= 0.5**0.5
    blocks = images.unflatten(3, (8, 8)).unflatten(2, (8, 8)).transpose(3, 4)  # [B, 3, 8, 8, 8, 8]
    coefficients = basis @ blocks @ basis.T
    steps = step * (1 + n[:, None] + n[None, :]) / 2
    blocks = basis.T @ ((coefficients / steps).round() * steps) @ basis
    return blocks.transpose(3, 4).flatten(4, 5).flatten(2, 3)


def loss_of(outputs: tuple[Tensor, Tensor, Tensor], labels: Labels) -> Tensor:
    layout, concept, style = outputs
    smooth = 0.05
    return (
        F.cross_entropy(layout, labels.layout, label_smoothing=smooth)
        + F.cross_entropy(concept.flatten(0, 1), labels.concepts.flatten(), label_smoothing=smooth)
        + F.cross_entropy(style.flatten(0, 1), labels.styles.flatten(), label_smoothing=smooth)
    )


def train(
    atlas: Atlas, concepts: Concepts, *, minutes: float, batch: int = 512, workers: int = 4, seed: int = 0
) -> Judge:
    """A judge trained for so many minutes on the atlas' device; one-cycle AdamW."""
    torch.manual_seed(seed)
    device = atlas.device
    judge = Judge(len(concepts)).to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=0.0, weight_decay=0.02, betas=(0.9, 0.98))
    stream = batches(batch, concepts, workers, first_seed=seed * 1_000_003 + 1)
    next(stream)  # starting the workers is not training time
    start, step, seen = time.perf_counter(), 0, 0
    while (progress := (time.perf_counter() - start) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(progress / 0.05, (1 - progress) / 0.95)
        plan, *arrays = next(stream)
        labels = Labels(*(torch.from_numpy(array).to(device) for array in arrays))
        images = degrade(render(plan, atlas, width=RENDER_SIDE, height=RENDER_SIDE))
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            outputs = judge(images.contiguous(memory_format=torch.channels_last))
        layout, concept, style = (output.float() for output in outputs)
        loss = loss_of((layout, concept, style), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(judge.parameters(), 5.0)
        optimizer.step()
        step, seen = step + 1, seen + len(images)
        if step % 200 == 1:
            seconds = time.perf_counter() - start
            print(f"judge {seconds:6.1f} s  step {step}  {seen} images  loss {loss.item():.3f}", flush=True)
    stream.close()
    return judge.eval()


@torch.no_grad()
def accuracy(
    judge: Judge, atlas: Atlas, concepts: Concepts, *, count: int = 4096, seed: int = 987_654_321
) -> dict:
    """Shares of right answers on fresh real scenes, clean and degraded, held-out combinations included."""
    torch.manual_seed(seed % 2**31)
    results = {}
    for name in ("clean", "degraded"):
        right = {"layout": 0, "concepts": 0, "styles": 0, "first": 0}
        total = total_objects = 0
        for part in range(-(-count // 512)):
            plan, *arrays = make_batch(seed + part, 512, concepts)
            labels = Labels(*(torch.from_numpy(array) for array in arrays))
            images = render(plan, atlas, width=RENDER_SIDE, height=RENDER_SIDE)
            images = degrade(images) if name == "degraded" else F.avg_pool2d(images, 2)
            layout, concept, style = judge_images(judge, images)
            objects = labels.layout > 0
            same = concept.argmax(2) == labels.concepts
            right["layout"] += (layout.argmax(1) == labels.layout).sum().item()
            right["concepts"] += same.all(dim=1)[objects].sum().item()
            right["first"] += same[objects, 0].sum().item()
            right["styles"] += (style.argmax(2) == labels.styles).all(dim=1)[objects].sum().item()
            total, total_objects = total + len(images), total_objects + int(objects.sum())
        results[name] = {
            key: round(value / (total if key == "layout" else total_objects), 4)
            for key, value in right.items()
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the judge CNN and print how often it is right.")
    build = Path(__file__).parent / "build"
    parser.add_argument("--data", type=Path, default=build)
    parser.add_argument("--out", type=Path, default=build / "judge.safetensors")
    parser.add_argument("--minutes", type=float, default=1.5)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--workers", type=int, default=4, help="processes that draw scenes; 0 for none")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--num-concepts", type=int, help="only the first so many, to try the loop on a small machine"
    )
    arguments = parser.parse_args()
    concepts = Concepts.load(arguments.data / "concepts.json")
    if arguments.num_concepts:
        concepts = concepts.first(arguments.num_concepts)
    atlas = Atlas.load(arguments.data, device=arguments.device, side=RENDER_SIDE)
    judge = train(
        atlas, concepts, minutes=arguments.minutes, batch=arguments.batch, workers=arguments.workers
    )
    save_judge(judge, arguments.out)
    saved = load_judge(arguments.out, arguments.device)
    size = arguments.out.stat().st_size / 1e6
    print(f"{arguments.out}: {sum(p.numel() for p in judge.parameters()):,} parameters, {size:.2f} MB")
    for name, shares in accuracy(saved, atlas, concepts).items():
        print(f"{name:9}", "  ".join(f"{key} {100 * share:.2f} %" for key, share in shares.items()))


if __name__ == "__main__":
    main()
