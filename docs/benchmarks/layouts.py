"""What layouts of several devices gain over one: python docs/benchmarks/layouts.py --devices 2

    --recipe NAME        what to draw with; its layout is replaced (default: random H3-Image weights)
    --layout a=2,b=2     one layout, repeatable; default: those that make sense for so many devices
    --sizes WxH,...      pictures to draw (default 2048x2048,4096x4096)
    --seconds N          stop before a layout that would begin later than this
    --set KEY=VALUE      any recipe key, repeatable
    --out FILE           JSON lines, one as soon as each measurement is done

First one device, then each layout: a warm-up, then `--requests` pictures, medians of their stages, how far
the picture is from the single device's, and the same exchanges between the ranks alone, timed without the
computation, from which the share of communication follows. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from portable_dit import Engine, Request
from portable_dit.errors import RecipeError
from portable_dit.layout import Layout
from portable_dit.models.spec import ModelSpec, Workload
from portable_dit.parallel.collectives import Group, Pulse, split_evenly
from portable_dit.parallel.mesh import join_mesh, leave_mesh
from portable_dit.plugins import select_backend
from portable_dit.recipe import Recipe, make_recipe
from portable_dit.request import parse_size
from portable_dit.setup import set_up
from portable_dit.yaml_lines import parse_value

PROMPT = "a red apple on a sky blue background, 3d style"
ROUNDS = 5


@dataclass(frozen=True)
class Measured:
    """Seconds are medians. exchanges: of one step, alone. off: mean difference to one device, in levels."""

    layout: str
    size: str
    step: float
    denoise: float
    vae_decode: float
    total: float
    exchanges: float
    load: float
    off: float


def layouts_for(devices: int, *, guidance: bool) -> list[dict[str, int]]:
    """The layouts worth a look: each form alone over all devices, and the usual pairs."""
    found = [{"ulysses": devices, "vae_tiles": devices}, {"ulysses": devices}, {"tensor": devices}]
    found.append({"ring": devices})
    if devices >= 4:
        found.append({"tensor": 2, "ulysses": devices // 2})
    if guidance:
        found.insert(0, {"guidance": 2, **({"tensor": devices // 2} if devices > 2 else {})})
    return found


def recipe_of(options: argparse.Namespace, layout: dict[str, int]) -> Recipe:
    """The recipe with another layout on this machine."""
    overrides = dict(setting.split("=", 1) for setting in options.set)
    values: dict[str, Any] = {key: parse_value(text) for key, text in overrides.items()}
    values |= {f"layout.{axis}": degree for axis, degree in layout.items()}
    values |= {"executor": "mp"}  # one device too, so that its memory is free again afterwards
    if options.recipe is None:
        base = {"model": "h3-image", "weights": "random", "device": {"backend": options.backend}}
        return make_recipe(base, values)
    from portable_dit.catalog import load_recipe

    plain = {f"layout.{axis}": 1 for axis in asdict(Layout())}
    return load_recipe(options.recipe, {**plain, "device.count": None, **values})


def measure(
    options: argparse.Namespace, layout: dict[str, int], pictures: dict[str, np.ndarray]
) -> list[Measured]:
    """Every size on one loaded engine. pictures: of one device, by size, which the first call fills."""
    recipe = recipe_of(options, layout)
    name = " ".join(f"{axis} {degree}" for axis, degree in layout.items()) or "one device"
    alone = exchange_seconds(options, recipe) if layout else {}
    start = time.perf_counter()
    found = []
    with Engine.load(recipe) as engine:
        load = time.perf_counter() - start
        for size in options.sizes.split(","):
            request = Request(PROMPT, size=parse_size(size), format="png", steps=options.steps)
            picture = engine.generate(request).images[0].pixels
            reference = pictures.setdefault(size, picture)
            results = [engine.generate(request) for _ in range(options.requests)]

            def median(stage: str, results: Sequence[Any] = results) -> float:
                return statistics.median(result.seconds[stage] for result in results)

            steps = [s for result in results for s in result.images[0].step_seconds]
            found.append(
                Measured(
                    name,
                    size,
                    step=statistics.median(steps),
                    denoise=median("denoise"),
                    vae_decode=median("vae_decode"),
                    total=median("total"),
                    exchanges=alone.get(size, 0.0),
                    load=load,
                    off=float(np.abs(picture.astype(int) - reference).mean()),
                )
            )
    return found


def exchange_seconds(options: argparse.Namespace, recipe: Recipe) -> dict[str, float]:
    """By size: seconds of one step's exchanges alone, in processes of their own."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ}
    word = recipe.model_dump_json(exclude_unset=True)
    commands = [
        [sys.executable, __file__, "--rank", str(rank), "--port", str(store.port), "--sizes", options.sizes]
        for rank in range(set_up(recipe).plan.layout.replica)
    ]
    ranks = [
        subprocess.Popen([*command, "--word", word], stdout=subprocess.PIPE, env=environment, text=True)
        for command in commands
    ]
    answers = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), answers
    seconds: dict[str, float] = json.loads(answers[0].strip().splitlines()[-1])
    return seconds


def time_exchanges(rank: int, port: int, sizes: str, word: str) -> None:
    """One rank of `exchange_seconds`."""
    recipe = make_recipe(json.loads(word))
    setup = set_up(recipe, rank=rank)
    spec, plan = setup.spec, setup.plan
    setup.backend.activate(setup.device)
    store = dist.TCPStore("127.0.0.1", port, None, False)
    mesh = join_mesh(
        plan.layout, rank, setup.backend, setup.device, timeout_seconds=120, pulse=Pulse(), store=store
    )
    dtype, device = getattr(torch, plan.dtype["dit"]), setup.device.torch_device
    seconds = {}
    for size in sizes.split(","):
        work = Workload(*parse_size(size), spec.prompt_tokens)
        calls = _exchanges_of_a_step(mesh.group, spec, work, dtype, device)
        rounds = []
        for _ in range(ROUNDS):
            setup.backend.synchronize(setup.device)
            start = time.perf_counter()
            for call in calls:
                call()
            setup.backend.synchronize(setup.device)
            rounds.append(time.perf_counter() - start)
        seconds[size] = statistics.median(rounds)
    print(json.dumps(seconds))
    leave_mesh()


def _exchanges_of_a_step(
    group: Callable[[str], Group], spec: ModelSpec, work: Workload, dtype: torch.dtype, device: str
) -> list[Callable[[], object]]:
    """What `parallel` sends in one denoise step, as calls."""
    ulysses, ring, tensor, whole, guidance = (
        group(name) for name in ("ulysses", "ring", "tensor", "sequence", "guidance")
    )
    branches = spec.branches(spec.default_guidance)
    batch = 1 if guidance.size > 1 else branches
    lengths = split_evenly(spec.rows(work) // spec.guidance_branches, whole.size)
    mine, first = lengths[whole.index], ring.index * ulysses.size
    near = list(lengths[first : first + ulysses.size])
    calls: list[Callable[[], object]] = []
    hidden = torch.zeros(batch, mine, spec.hidden_size, dtype=dtype, device=device)
    if ulysses.size > 1:
        for heads, times in ((spec.num_heads, 1), (max(spec.num_kv_heads, ulysses.size), 2)):
            width = batch * heads * spec.head_dim // tensor.size // ulysses.size
            out = torch.zeros(ulysses.size * mine, width, dtype=dtype, device=device)
            calls += [partial(ulysses.exchange, out, [mine] * ulysses.size, near)] * times
        width = batch * spec.num_heads * spec.head_dim // tensor.size // ulysses.size
        back = torch.zeros(sum(near), width, dtype=dtype, device=device)
        calls.append(partial(ulysses.exchange, back, near, [mine] * ulysses.size))
    if ring.size > 1:
        width = spec.num_kv_heads // tensor.size // ulysses.size * spec.head_dim
        keys = torch.zeros(batch, sum(near), width, dtype=dtype, device=device)

        def turn() -> None:
            ring.pass_on((keys, keys), (torch.empty_like(keys), torch.empty_like(keys))).wait()

        calls += [turn] * (ring.size - 1)
    if tensor.size > 1:
        sums = sum(split.component == "dit" and split.along == "in" for split in spec.tensor_plan)
        calls += [partial(tensor.all_reduce, hidden)] * sums
    calls *= spec.num_blocks
    if whole.size > 1:
        calls.append(partial(whole.gather_rows, hidden, lengths))
    if guidance.size > 1 and branches > 1:
        velocity = torch.zeros(1, 1, spec.latent_values(work.width, work.height), device=device)
        calls.append(partial(guidance.gather_rows, velocity, (1, 1)))
    return calls


def table(found: Sequence[Measured]) -> str:
    """The measurements in Markdown, each beside one device."""
    one = {m.size: m for m in found if m.layout == "one device"}
    lines = [
        "| layout | size | step | gain | denoise | VAE | request | gain | exchanges alone | off by |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for m in found:
        base = one.get(m.size, m)
        share = (
            f"{1000 * m.exchanges:.1f} ms, {m.exchanges / m.step:.0%} of a step" if m.exchanges else "none"
        )
        lines.append(
            f"| {m.layout} | {m.size} | {1000 * m.step:.1f} ms | {base.step / m.step:.2f}x | "
            f"{m.denoise:.3f} s | {m.vae_decode:.3f} s | {m.total:.3f} s | {base.total / m.total:.2f}x | "
            f"{share} | {m.off:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--recipe")
    parser.add_argument("--layout", action="append", default=[])
    parser.add_argument("--sizes", default="2048x2048,4096x4096")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--out", type=Path)
    for hidden in ("--rank", "--port", "--word"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.word:
        time_exchanges(int(options.rank), int(options.port), options.sizes, options.word)
        return
    if options.backend == "auto" and options.recipe is None:
        options.backend = select_backend(None).id
    guidance = set_up(recipe_of(options, {})).spec.has_guidance
    wanted = [dict(pair.split("=") for pair in text.split(",")) for text in options.layout]
    chosen = [{axis: int(degree) for axis, degree in layout.items()} for layout in wanted]
    start, found, pictures = time.monotonic(), list[Measured](), dict[str, np.ndarray]()
    for layout in [{}, *(chosen or layouts_for(options.devices, guidance=guidance))]:
        if time.monotonic() - start > options.seconds:
            print(f"not measured, no time left: {layout}", file=sys.stderr)
            continue
        try:
            set_up(recipe_of(options, layout))
        except RecipeError as error:
            print(f"not measured: {error}", file=sys.stderr)
            continue
        fresh = measure(options, layout, pictures)
        found += fresh
        for line in (json.dumps(asdict(m)) for m in fresh):
            print(line, file=sys.stderr, flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(line + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
