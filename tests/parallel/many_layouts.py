"""Ranks that draw with many layouts, one after the other: many_layouts.py JOBS WORLD PORT

Starting processes takes longer than drawing with tiny models, so that each world size is started once, and
its ranks are forks of one process that has imported everything. What is drawn goes through the same code as
under `workers`: a mesh, a rank's part of the model, a `Drawing`.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from portable_dit.loading import load_model
from portable_dit.models.h3_image import qwen_config
from portable_dit.models.spec import TensorSplit
from portable_dit.ops import Dispatch
from portable_dit.parallel.collectives import Pulse
from portable_dit.parallel.mesh import Mesh, make_mesh
from portable_dit.recipe import make_recipe
from portable_dit.request import Request
from portable_dit.setup import set_up
from portable_dit.stages import draw_all

TEXT_LAYERS = 4  # of H3-Image's text encoder, instead of 50
IMPORTED_WHEN_LOADING = (
    "portable_dit.models.h3_image.model",
    "portable_dit.models.h3_image.qwen",
    "portable_dit.models.hunyuan_image_3.model",
)
PROBE_ROWS = 8


@dataclass(frozen=True)
class Job:
    """A picture to draw. keys: of the recipe, dotted. mutation: a name in `MUTATIONS`, planted before."""

    name: str
    keys: dict[str, Any]
    request: Request
    mutation: str | None = None
    trace: bool = False
    probe: bool = False


@dataclass(frozen=True)
class Answer:
    """What rank 0 saw. sent: bytes that left each rank in a step, by kind of exchange. rows: of that step.

    probed: what layers give that are divided along their in features.
    """

    pixels: np.ndarray | None
    bytes_read: tuple[int, ...] = ()
    sent: tuple[dict[str, int], ...] = ()
    rows: int = 0
    problem: str = ""
    probed: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Traffic:
    """Counts what torch.distributed is given, by the formulas of the rings that carry it out."""

    sent: dict[str, int] = field(default_factory=dict)
    host: Any = None

    def add(self, kind: str, size: float) -> None:
        self.sent[kind] = self.sent.get(kind, 0) + round(size)

    def watch(self) -> Callable[[], None]:
        """Puts itself around torch.distributed; gives what takes it off again."""
        names = ("all_reduce", "all_to_all_single", "_all_gather", "batch_isend_irecv")
        from portable_dit.parallel import collectives

        plain = {name: getattr(dist, name) for name in names if name[0] != "_"}
        gather = collectives._all_gather

        def all_reduce(x, *args, group=None, **kwargs):
            if dist.get_backend(group) and group is not self.host:
                n = dist.get_world_size(group)
                self.add("all_reduce", 2 * (n - 1) / n * x.nbytes)
            return plain["all_reduce"](x, *args, group=group, **kwargs)

        def all_to_all(out, x, receives, sends, group=None):
            mine = sends[dist.get_rank(group)]
            self.add("all_to_all", (sum(sends) - mine) * x.nbytes / max(len(x), 1))
            return plain["all_to_all_single"](out, x, receives, sends, group)

        def all_gather(out, x, group=None):
            self.add("all_gather", (dist.get_world_size(group) - 1) * x.nbytes)
            return gather(out, x, group=group)

        def batch(operations):
            self.add("send", sum(op.tensor.nbytes for op in operations if op.op is dist.isend))
            return plain["batch_isend_irecv"](operations)

        dist.all_reduce, dist.all_to_all_single = all_reduce, all_to_all
        dist.batch_isend_irecv, collectives._all_gather = batch, all_gather

        def off() -> None:
            for name, function in plain.items():
                setattr(dist, name, function)
            collectives._all_gather = gather

        return off


def shrink_references(folder: Path) -> None:
    """References of 96 x 64 pixels instead of a million, seen by a vision tower that takes small ones."""
    for file, keys in (
        ("scheduler/scheduler_config.json", {"reference_pixels": 96 * 64}),
        ("processor/preprocessor_config.json", {"size": {"shortest_edge": 1024, "longest_edge": 65536}}),
    ):
        config = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**config, **keys}))


def drop_the_tail() -> Callable[[], None]:
    """An uneven split whose last rows are left out, as a division without its rest would."""
    from portable_dit.parallel import sequence

    plain = sequence.split_evenly
    sequence.split_evenly = lambda count, parts: (count // parts,) * parts
    return lambda: setattr(sequence, "split_evenly", plain)


def shared_as_split() -> Callable[[], None]:
    """Keys that every rank has are exchanged like those that were split, so that all see them twice."""
    from portable_dit.parallel.sequence import UlyssesAttention

    plain = UlyssesAttention._keys_to_heads

    def exchanged(self, x, lengths, shared):
        return self._to_heads(x, [length + shared for length in lengths])

    UlyssesAttention._keys_to_heads = exchanged
    return lambda: setattr(UlyssesAttention, "_keys_to_heads", plain)


def sum_not_taken() -> Callable[[], None]:
    """Tensor parallel without the sum over ranks."""
    from portable_dit.parallel.collectives import Group

    plain = Group.all_reduce
    Group.all_reduce = lambda self, x: x
    return lambda: setattr(Group, "all_reduce", plain)


def ring_forgets_a_turn() -> Callable[[], None]:
    """A ring whose last place's keys are never merged."""
    from portable_dit.parallel import sequence

    plain = sequence._Merged.with_more
    sequence._Merged.with_more = lambda self, out, lse: self
    return lambda: setattr(sequence._Merged, "with_more", plain)


def wrong_branch() -> Callable[[], None]:
    """Guidance whose groups evaluate one and the same branch."""
    from portable_dit.parallel import guidance

    plain = guidance.own_branches
    guidance.own_branches = lambda count, group: (0,)
    return lambda: setattr(guidance, "own_branches", plain)


def scales_not_agreed() -> Callable[[], None]:
    """Ranks that quantise their part of a row as if it were all of it."""
    from portable_dit.parallel import parts

    plain = parts.share_input_scales
    parts.share_input_scales = lambda *arguments, **named: None
    return lambda: setattr(parts, "share_input_scales", plain)


MUTATIONS = {
    f.__name__: f
    for f in (
        drop_the_tail,
        shared_as_split,
        sum_not_taken,
        ring_forgets_a_turn,
        wrong_branch,
        scales_not_agreed,
    )
}


@torch.inference_mode()
def probe(dit: nn.Module, splits: Sequence[TensorSplit], mesh: Mesh | None = None) -> dict[str, torch.Tensor]:
    """What the first block's layers give that are divided along their in features: [M, N] by name.

    Every rank gives its part of one input, whose largest values lie in the last part.
    """
    found = {}
    for split in splits:
        if (split.component, split.along) != ("dit", "in"):
            continue
        name = split.pattern.replace("*", "0")
        layer = dit.get_submodule(name)
        axis = "experts_alike" if split.experts else "tensor"
        group = None if mesh is None else mesh.group(axis)
        x, rows = probe_input(name, layer.in_features * (1 if group is None else group.size)), PROBE_ROWS
        x = x.to(layer.dtype) if group is None else x.chunk(group.size, dim=1)[group.index].to(layer.dtype)
        if not split.experts:  # which sums over the ranks, unless it is done for it
            found[name] = layer(x) if group is None or not split.sum_at else group.all_reduce(layer(x))
            continue
        each = rows // split.experts
        ends = torch.arange(1, layer.num_experts + 1, dtype=torch.int32) * each
        mine = x[layer.first * each : layer.first * each + int(ends[-1])]
        given = x.new_zeros(rows, layer.out_features)
        given[layer.first * each : layer.first * each + len(mine)] = layer(mine, Dispatch(None, ends))
        found[name] = given if mesh is None else mesh.group("tensor").all_reduce(given)
    return found


def probe_input(name: str, columns: int) -> torch.Tensor:
    """float32 [M, K], the same everywhere."""
    x = torch.randn(PROBE_ROWS, columns, generator=torch.Generator().manual_seed(sum(name.encode())))
    x[:, -2] *= 20
    return x


def draw(job: Job, rank: int) -> Answer:
    setup = set_up(make_recipe({}, job.keys), rank=rank)
    layout = setup.plan.layout
    pulse = Pulse()
    mesh = make_mesh(layout, rank, pulse)
    undo = MUTATIONS[job.mutation]() if job.mutation else lambda: None
    try:
        return _drawn(job, setup, mesh)
    except (RuntimeError, AssertionError, IndexError) as error:
        if job.mutation is None:
            raise
        return Answer(None, problem=f"{type(error).__name__}: {error}")
    finally:
        undo()


def _drawn(job: Job, setup: Any, mesh: Mesh) -> Answer:
    loaded = load_model(setup, mesh=mesh)
    request = setup.resolve(job.request)
    traffic, marks = Traffic(), []
    off = traffic.watch() if job.trace else lambda: None

    def tick(place: int, event: Any) -> None:
        if type(event).__name__ == "Stepped":
            marks.append(dict(traffic.sent))

    try:
        (result,) = draw_all(setup, loaded, [request], tick, lambda place: False, [False])
    finally:
        off()
    pixels = result.images[0].pixels if mesh.leads else None
    splits = setup.spec.tensor_plan if job.probe else ()
    probed = probe(loaded.model.component("dit"), splits, mesh)
    sent: dict[str, int] = {}
    if job.trace:  # what came between the first and the second step
        sent = {kind: size - marks[0].get(kind, 0) for kind, size in marks[1].items()}
    both: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(both, (loaded.bytes_read, sent))
    rows = _rows(loaded, request) if job.trace else 0
    loaded.release()
    reads, sends = zip(*both, strict=True)
    return Answer(pixels, reads, sends, rows, probed=probed)


@torch.inference_mode()
def _rows(loaded: Any, request: Any) -> int:
    """Rows of one branch of a step."""
    model, pictures = loaded.model, [reference.pixels for reference in request.references]
    prompt = model.encode_prompt(request.prompt, pictures, None)
    schedule, size = model.schedule(request.steps), (request.width, request.height)
    denoiser = model.prepare(prompt, pictures, *size, schedule, 0, guidance=request.guidance_scale)
    latents = model.noise(*size, pictures, 0)
    return int(denoiser.embed(latents, 0)[0].shape[1])


def run_rank(jobs: Path, rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    qwen_config.STATE = TEXT_LAYERS
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    answers = {job.name: draw(job, rank) for job in pickle.loads(jobs.read_bytes())}
    if rank == 0:
        jobs.with_suffix(".answers").write_bytes(pickle.dumps(answers))
    dist.destroy_process_group()


def main(jobs: Path, world: int, port: int) -> None:
    """Ends with the first rank that fails, since the others would wait for it."""
    for name in IMPORTED_WHEN_LOADING:
        importlib.import_module(name)
    processes = multiprocessing.get_context("fork")
    ranks = [
        processes.Process(target=run_rank, args=(jobs, rank, world, port), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    while any(process.exitcode is None for process in ranks):
        wait([process.sentinel for process in ranks if process.exitcode is None])
        if failed := [rank for rank, process in enumerate(ranks) if process.exitcode]:
            sys.exit(f"rank {failed[0]} of {world} failed")


if __name__ == "__main__":
    from many_layouts import main as run  # under its own name, as the jobs were pickled

    run(Path(sys.argv[1]), *map(int, sys.argv[2:]))
