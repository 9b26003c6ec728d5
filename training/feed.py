"""Worker processes that draw scene descriptions and captions ahead of the GPU that renders them. Torch-free.

A chunk is one bounded piece of work for the renderer: arrays only. Each kind of chunk has its own bounded
queue, so a kind that nobody asks for costs a few idle processes and no time.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from portable_dit.evaluation.builtin.scenes import Record
from training.captions import Tokenizer
from training.scenes import (
    EDIT_MIX,
    T2I_MIX,
    THREE_MIX,
    TWO_MIX,
    Concepts,
    RenderPlan,
    plan_render,
    sample_records,
    sample_scenes,
)

QUEUE_CHUNKS = 6
THREE_SHARE = 1 / 3  # of the records with several references


@dataclass(frozen=True)
class FeedKind:
    """What one queue holds. references: slots in a record, 0, 1 or 3; None = bare scenes for the VAE.

    sizes: canvases (width, height) with their weights; one is drawn for each chunk. count: records in a
    chunk.
    """

    name: str
    references: int | None
    sizes: tuple[tuple[int, int, float], ...]
    count: int
    workers: int = 1


@dataclass(frozen=True)
class Chunk:
    """Records of one canvas size. plan: all targets, then the references that exist.

    ids: int64 [n, 32], length: int64 [n]. slots: int64 [n, R], place of each reference in the plan, -1 for
    none.
    """

    name: str
    width: int
    height: int
    plan: RenderPlan
    ids: np.ndarray
    length: np.ndarray
    slots: np.ndarray

    def __len__(self) -> int:
        return len(self.slots)


def sample_for(rng: random.Random, kind: FeedKind, concepts: Concepts) -> list[Record]:
    """Training records with as many references as the kind has slots for."""
    if kind.references == 0:
        return sample_records(rng, kind.count, concepts, mix=T2I_MIX)
    if kind.references == 1:
        return sample_records(rng, kind.count, concepts, mix=EDIT_MIX)
    threes = round(kind.count * THREE_SHARE)
    records = sample_records(rng, kind.count - threes, concepts, mix=TWO_MIX)
    records += sample_records(rng, threes, concepts, mix=THREE_MIX)
    return records


def pack_records(
    records: list[Record], *, name: str, slots: int, width: int, height: int, tokenizer: Tokenizer
) -> Chunk:
    """The arrays of some records that share a canvas; also used to lay out evaluation prompts."""
    scenes = [record.target for record in records]
    places = np.full((len(records), slots), -1, dtype=np.int64)
    for row, record in enumerate(records):
        for slot, scene in enumerate(record.references):
            places[row, slot] = len(scenes)
            scenes.append(scene)
    ids, length = tokenizer([record.caption for record in records])
    return Chunk(name, width, height, plan_render(scenes), ids, length, places)


def make_chunk(rng: random.Random, kind: FeedKind, concepts: Concepts, tokenizer: Tokenizer) -> Chunk:
    """One chunk of a kind."""
    width, height = rng.choices([(w, h) for w, h, _ in kind.sizes], weights=[s[2] for s in kind.sizes])[0]
    if kind.references is None:
        plan = plan_render(sample_scenes(rng, kind.count, concepts))
        none = np.zeros((kind.count, 0), dtype=np.int64)
        return Chunk(kind.name, width, height, plan, none, np.zeros(kind.count, dtype=np.int64), none)
    return pack_records(
        sample_for(rng, kind, concepts), name=kind.name, slots=kind.references, width=width, height=height,
        tokenizer=tokenizer,
    )  # fmt: skip


def _work(kind: FeedKind, folder: str, seed: int, chunks: Any, stop: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rng = random.Random(seed)
    concepts = Concepts.load(Path(folder) / "concepts.json")
    tokenizer = Tokenizer(Path(folder) / "vocab.txt")
    while not stop.is_set():
        chunk = make_chunk(rng, kind, concepts, tokenizer)
        while not stop.is_set():
            try:
                chunks.put(chunk, timeout=1.0)
                break
            except queue.Full:
                continue


class Feed:
    """Queues of chunks by name. in_process: draw on demand instead, without processes."""

    def __init__(
        self, kinds: list[FeedKind], folder: str | Path, *, seed: int, in_process: bool = False
    ) -> None:
        self.kinds = {kind.name: kind for kind in kinds}
        self.in_process = in_process
        self.processes: list[Any] = []
        if in_process:
            self.rng = random.Random(seed)
            self.concepts = Concepts.load(Path(folder) / "concepts.json")
            self.tokenizer = Tokenizer(Path(folder) / "vocab.txt")
            return
        context = multiprocessing.get_context("spawn")
        self.stopping = context.Event()
        self.queues = {kind.name: context.Queue(maxsize=QUEUE_CHUNKS * kind.workers) for kind in kinds}
        for i, kind in enumerate(kinds):
            for j in range(kind.workers):
                arguments = (
                    kind,
                    str(folder),
                    seed + 1009 * i + 7919 * j,
                    self.queues[kind.name],
                    self.stopping,
                )
                process = context.Process(target=_work, args=arguments, daemon=True)
                process.start()
                self.processes.append(process)

    def get(self, name: str, *, timeout: float = 60.0) -> Chunk:
        """The next chunk of a kind. Raises RuntimeError when its workers died or are too slow."""
        if self.in_process:
            return make_chunk(self.rng, self.kinds[name], self.concepts, self.tokenizer)
        try:
            chunk: Chunk = self.queues[name].get(timeout=timeout)
        except queue.Empty:
            alive = sum(process.is_alive() for process in self.processes)
            raise RuntimeError(
                f"no {name} chunk in {timeout} s, {alive} of {len(self.processes)} workers alive. "
                "Look for a worker's traceback above."
            ) from None
        return chunk

    def stop(self) -> None:
        if self.in_process:
            return
        self.stopping.set()
        for process in self.processes:
            process.join(timeout=3)
            if process.is_alive():
                process.terminate()
        for q in self.queues.values():
            q.cancel_join_thread()
            q.close()
