"""Speed of loading against reading and copying the same bytes: python docs/benchmarks/load.py [--gb 4]

Writes a checkpoint of bfloat16 layers as large as asked for into a temporary folder, in shards, and times in
turn, again and again: reading each file into a buffer and copying that to the device; and
`portable_dit.weights.load_component`, with its checks for NaN, its renames and its memory limit, also into
quantised layers if a format is named. All read from the page cache, unless the machine has less memory than
the files. Prints a table in Markdown; the share is of medians within one run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from portable_dit.host import ask_for_huge_pages
from portable_dit.models.spec import TensorSource
from portable_dit.plugins import select_backend
from portable_dit.quantize import quantize
from portable_dit.safetensors_file import TensorFileWriter, stored_tensors
from portable_dit.weights import load_component

ROWS, COLUMNS = 14336, 5376  # a linear layer of H3-Image's size, 154 MB
SHARD = 32  # layers of one file


def write_layers(folder: Path, count: int) -> int:
    """Shards of `count` layers with equal numbers in bfloat16; gives their bytes."""
    weight = (torch.randn(ROWS, COLUMNS) / COLUMNS**0.5).bfloat16()
    data = memoryview(weight.flatten().view(torch.uint8).numpy().data)
    for first in range(0, count, SHARD):
        names = [f"{k}.weight" for k in range(first, min(first + SHARD, count))]
        path = folder / f"model-{first:05}.safetensors"
        with TensorFileWriter(path, dict.fromkeys(names, ("BF16", (ROWS, COLUMNS)))) as writer:
            for name in names:
                writer.write(name, data)
    return count * len(data)


def raw(folder: Path, device: str) -> None:
    """Every file read into a buffer, and the buffer copied to the device."""
    kept = []
    for path in sorted(folder.glob("*.safetensors")):
        buffer = torch.empty(path.stat().st_size, dtype=torch.uint8)
        with path.open("rb", buffering=0) as file:
            view, place = memoryview(buffer.numpy().data), 0
            while place < len(view):
                place += file.readinto(view[place : place + (64 << 20)]) or 0
        kept.append(buffer.to(device, copy=True))


def load(folder: Path, device: str, count: int, format: str | None) -> None:
    with torch.device("meta"):
        module = nn.ModuleList(
            nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16) for _ in range(count)
        )
    if format is not None:
        backend = select_backend(None)
        kernel = backend.linear_kernels()[format][-1].id
        quantize(module, format=format, keep=(), backend=backend, kernel_id=kernel)
    stored = stored_tensors(folder)
    sources = {name: TensorSource((name,), lambda tensor: tensor, by_rows=True) for name in stored}
    load_component(module, stored, sources=sources, device=lambda name: device)


def timed(call: Callable[[], None], device: str) -> float:
    start = time.perf_counter()
    call()
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=4.0, help="size of the checkpoint")
    parser.add_argument("--device", default="cpu", help="torch's name of the device")
    parser.add_argument("--format", help="also load into layers of this number format")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    args = parser.parse_args()
    ask_for_huge_pages()  # as engines of accelerators do before they load
    count = max(1, round(args.gb * 1e9 / (2 * ROWS * COLUMNS)))
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        size = write_layers(folder, count)
        calls = {
            "raw read and copy": lambda: raw(folder, args.device),
            "load_component": lambda: load(folder, args.device, count, None),
        }
        if args.format:
            calls[f"load_component as {args.format}"] = lambda: load(folder, args.device, count, args.format)
        seconds: dict[str, list[float]] = {label: [] for label in calls}
        for _ in range(args.repeats):
            for label, call in calls.items():
                seconds[label].append(timed(call, args.device))
    medians = {label: statistics.median(values) for label, values in seconds.items()}
    print(f"{size / 1e9:.2f} GB in {count} tensors, to {args.device}, {args.repeats} repeats\n")
    print("| what | median, s | least, s | GB/s | share of raw |\n| --- | --- | --- | --- | --- |")
    for label, values in seconds.items():
        rate, share = size / 1e9 / medians[label], medians["raw read and copy"] / medians[label]
        print(f"| {label} | {medians[label]:.3f} | {min(values):.3f} | {rate:.2f} | {share:.0%} |")


if __name__ == "__main__":
    main()
