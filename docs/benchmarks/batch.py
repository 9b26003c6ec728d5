"""What drawing pictures side by side gains through the engine, and whether they stay what they are alone.

    OMP_NUM_THREADS=1 python docs/benchmarks/batch.py --pictures 2 4

One request of so many images, and as many requests of one image, in turn, on one engine: the same seeds, so
files must be equal. Requests are drawn until the engine knows whether it may put them side by side; how many
that were is in the last column. Ratios of medians; above 1 is faster side by side. "whole" is the wall time
of a request, with the VAE and the files.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import torch

from portable_dit import Engine, Request, Result
from portable_dit.request import parse_size

PROMPT = "a red apple on a blue background"
UNDECIDED = "comparisons are done"


@dataclass(frozen=True)
class Row:
    """denoise, whole: of one at a time, over that of side by side. before: requests until it was known."""

    together: bool
    denoise: float
    whole: float
    equal: bool
    before: int


def measure(engine: Engine, size: tuple[int, int], pictures: int, rounds: int) -> Row:
    """One row: `rounds` of both ways in turn, once the engine knows which way it may go."""
    whole = Request(PROMPT, size=size, images=pictures, format="png")
    single = [Request(PROMPT, size=size, seed=seed, format="png") for seed in range(pictures)]
    before = 0
    while any(UNDECIDED in note for note in engine.generate(whole).notes):
        before += 1
    batches: list[Result] = []
    singles: list[list[Result]] = []
    for _ in range(rounds):
        batches.append(engine.generate(whole))
        singles.append([engine.generate(one) for one in single])
    equal = [image.data() for image in batches[-1].images] == [one.images[0].data() for one in singles[-1]]

    def ratio(stage: str) -> float:
        apart = statistics.median(sum(one.seconds[stage] for one in some) for some in singles)
        return apart / statistics.median(batch.seconds[stage] for batch in batches)

    together = batches[-1].images[0].batch == pictures
    return Row(together, ratio("denoise"), ratio("total"), equal, before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="cpu/h3-mini")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--sizes", nargs="+", default=["256x256", "384x384", "512x512"])
    parser.add_argument("--pictures", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    overrides = dict(change.split("=", 1) for change in arguments.set)
    print("| threads | size | pictures | side by side | denoise | whole | files equal | requests before |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for pictures in arguments.pictures:
        with Engine.load(arguments.recipe, {**overrides, "batch": pictures}) as engine:
            for size in arguments.sizes:
                row = measure(engine, parse_size(size), pictures, arguments.rounds)
                gains = f"{row.denoise:.2f} | {row.whole:.2f} | {row.equal} | {row.before}"
                threads = torch.get_num_threads()
                print(f"| {threads} | {size} | {pictures} | {row.together} | {gains} |", flush=True)


if __name__ == "__main__":
    main()
