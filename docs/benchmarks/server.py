"""What the server adds to a picture: the same request through it and through an engine, in turn.

    python docs/benchmarks/server.py --requests 30

Both draw with the same threads on the same machine, one after the other and never at once, so that what else
the machine does falls on both. Either is first in turn, after a pause: OpenMP's threads go on spinning for a
while when they have nothing to do, and would take the cores from the other program. The engine's side is
`generate` with the file encoded; the server's side is from opening the connection to the last byte of the
answer.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from server_process import running

from portable_dit.engine import Engine
from portable_dit.request import Request, parse_size


def through_server(url: str, size: str, seed: int) -> tuple[float, bytes]:
    """(seconds, file) of one picture over HTTP."""
    body = json.dumps({"prompt": "a red apple", "size": size, "seed": seed}).encode()
    request = urllib.request.Request(
        f"{url}/v1/images/generations", body, {"Content-Type": "application/json"}
    )
    begin = time.perf_counter()
    with urllib.request.urlopen(request) as response:
        answer = response.read()
    seconds = time.perf_counter() - begin
    return seconds, base64.b64decode(json.loads(answer)["data"][0]["b64_json"])


def through_engine(engine: Engine, size: str, seed: int) -> tuple[float, bytes]:
    begin = time.perf_counter()
    result = engine.generate(Request("a red apple", size=parse_size(size), seed=seed, format="png"))
    seconds = time.perf_counter() - begin
    return seconds, result.images[0].encoded["png"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="cpu/h3-mini")
    parser.add_argument("--sizes", nargs="+", default=["256x256", "512x512"])
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds before each picture")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine.load(arguments.recipe) as engine,
        running(arguments.recipe, Path(folder) / "jobs", "--quiet") as server,
    ):
        print("| size | engine, median | server, median | ratio | added, median of pairs | equal files |")
        print("| --- | --- | --- | --- | --- | --- |")
        for size in arguments.sizes:
            pairs = []
            equal = 0
            for seed in range(arguments.requests + 2):
                sides: list[Callable[[], tuple[float, bytes]]] = [
                    partial(through_engine, engine, size, seed),
                    partial(through_server, server.url, size, seed),
                ]
                found: dict[int, tuple[float, bytes]] = {}
                for side in (0, 1) if seed % 2 else (1, 0):
                    time.sleep(arguments.pause)
                    found[side] = sides[side]()
                if seed < 2:
                    continue  # warm-up
                pairs.append((found[0][0], found[1][0]))
                equal += found[0][1] == found[1][1]
            bare, served = (statistics.median(column) for column in zip(*pairs, strict=True))
            added = statistics.median(second - first for first, second in pairs)
            print(
                f"| {size} | {bare * 1e3:.1f} ms | {served * 1e3:.1f} ms | {served / bare:.3f} | "
                f"{added * 1e3:+.1f} ms | {equal} of {len(pairs)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
