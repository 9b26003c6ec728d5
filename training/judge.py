"""The judge: a small CNN that says what a picture of our world shows. It learns from real scenes only.

It reads 64 x 64 pixels and answers in two slots: the left (else upper) object and the right (else lower) one.
For one object, and for several of one kind, both slots answer the same. Train it with

    python -m training.judge --minutes 1.5 --out training/build/judge.safetensors
"""

import argparse
import multiprocessing
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from portable_dit.evaluation.builtin.judge import Judge, Labels, judge_images, label, load_judge
from training.render import Atlas, render
from training.scenes import DEFAULT_MIX, Concepts, RenderPlan, plan_render, sample_records

RENDER_SIDE = 128


def save_judge(judge: Judge, path: str | Path) -> None:
    tensors = {name: tensor.half().contiguous() for name, tensor in judge.state_dict().items() if tensor.ndim}
    save_file(tensors, path)


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
