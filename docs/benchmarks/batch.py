"""What drawing two pictures as a batch of two would gain, and whether they stay what they are alone.

    python docs/benchmarks/batch.py --threads 1 2

One prompt, two seeds, one size: the best case of two requests that could share a batch, since other prompts
have other numbers of tokens. The denoise loop runs once over both and once over each, in turn; the VAE
decodes each alone in both. Medians; pictures are compared pixel by pixel.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

from portable_dit.engine import Engine
from portable_dit.models.spec import Model
from portable_dit.pixels import to_pixels
from portable_dit.request import parse_size
from portable_dit.sampling import denoise
from portable_dit.tiles import run_tiles
from portable_dit.workers.inline import ThisProcess

SEEDS = 0, 1


def measure(model: Model, width: int, height: int, rounds: int) -> tuple[float, float, float, list[Tensor]]:
    """(seconds of the batch, of both alone, of both decodes, pictures of the batch and alone)."""
    schedule = model.schedule(6)
    prompt = model.encode_prompt("a red apple on a blue background", (), None)
    noises = [model.noise(width, height, (), seed) for seed in SEEDS]

    def drawn(noise: Tensor) -> Tensor:
        denoiser = model.prepare(prompt, (), width, height, schedule, 0, tile_batch=1, guidance=None)
        return denoise(denoiser, noise, schedule)

    together, alone, decoding = [], [], []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        batch = drawn(torch.cat(noises))
        middle = time.perf_counter()
        singles = [drawn(noise) for noise in noises]
        end = time.perf_counter()
        latents = [*batch.split(1), *singles]
        pictures = [to_pixels(model.decode(one, run=run_tiles, tile_batch=1)) for one in latents]
        together.append(middle - begin)
        alone.append(end - middle)
        decoding.append((time.perf_counter() - end) / 2)
    first, second, third = (statistics.median(times[1:]) for times in (together, alone, decoding))
    return first, second, third, pictures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="cpu/h3-mini")
    parser.add_argument("--sizes", nargs="+", default=["256x256", "384x384", "512x512"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    print(
        "| threads | size | denoise, batch | denoise, one by one | faster | whole pictures | pixels equal |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        with Engine.load(arguments.recipe) as engine, torch.inference_mode():
            assert isinstance(engine.workers, ThisProcess)
            assert engine.workers.loaded is not None
            model = engine.workers.loaded.model
            for size in arguments.sizes:
                batch, alone, decoding, pictures = measure(model, *parse_size(size), arguments.rounds)
                equal = [torch.equal(pictures[k], pictures[k + 2]) for k in range(2)]
                print(
                    f"| {threads} | {size} | {batch * 1e3:.0f} ms | {alone * 1e3:.0f} ms | "
                    f"{alone / batch:.2f} | {(alone + decoding) / (batch + decoding):.2f} | {all(equal)} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
