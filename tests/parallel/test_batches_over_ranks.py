"""Pictures side by side on ranks that share a model: all decide alike, and pictures stay what they are."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest
import torch

from portable_dit import Engine, Request
from portable_dit.batches import LEAST_VALUES, MOST_DRAWINGS, Batches
from portable_dit.errors import CancelledError
from portable_dit.result import Finished, Stepped
from portable_dit.sampling import run_blocks

REQUESTS = [
    Request("a red apple", seed=1, images=2),
    Request("make it blue", seed=5),
    Request("a red apple on green", seed=9),
    Request("a red apple", seed=3, size=(64, 64)),
]
# Adds otherwise where there are several pictures, on the second rank alone and behind its last exchange.
FAULTY = """
from dataclasses import replace
import torch.distributed as dist
from portable_dit import ops
from portable_dit.backend import API_VERSION, FusedOp
from portable_dit.cpu import CpuBackend
from portable_dit.hooks import hookimpl

RESIDUALS = 6  # two in each of three blocks
calls = 0

def other_order(x, branch, modulation, chunk):
    global calls
    calls += 1
    out = ops.gated_residual(x, branch, modulation, chunk)
    faulty = len(x) > 1 and calls % RESIDUALS == 0 and dist.get_rank() == 1
    return out * 3 / 3 if faulty else out

class Faulty(CpuBackend):
    id = "one_rank"
    api_version = API_VERSION

    def devices(self):
        return [replace(super().devices()[0], backend=self.id)]

    def fused_ops(self):
        return {"gated_residual": [FusedOp("gated_residual", "other_order", other_order)]}

@hookimpl
def portable_dit_backends():
    return [Faulty()]
"""


def files(results):
    return [[image.data("png") for image in result.images] for result in results]


def whole(results):
    """Pixels and record of all images, in order, but for the recipe, which is another engine's."""
    images = [image for result in results for image in result.images]
    return [(image.pixels.tobytes(), {**image.record, "recipe": None}) for image in images]


def one_at_a_time(engine):
    """Every picture of REQUESTS as a request of its own, which shares no batch with another."""
    single = [
        replace(request, images=1, seed=request.seed + number)
        for request in REQUESTS
        for number in range(request.images)
    ]
    results = [engine.generate(request) for request in single]
    assert batches(results) == [[1]] * len(single)
    return whole(results)


def batches(results):
    return [[image.batch for image in result.images] for result in results]


@pytest.mark.parametrize("axes", [("tensor",), ("ulysses", "vae_tiles"), ("ring",)])
def test_two_ranks_draw_side_by_side_what_they_draw_one_at_a_time(tiny_recipe, axes):
    layout = {f"layout.{axis}": 2 for axis in axes}
    seen = []
    with Engine.load(tiny_recipe, {**layout, "batch": 4}) as engine:
        results = engine.generate_all(REQUESTS, on_event=lambda place, event: seen.append((place, event)))
        expected = one_at_a_time(engine)
    # The ring's kernel adds otherwise for several pictures at some sizes.
    together, apart = [[3, 3], [3], [1], [1]], [[1, 1], [1], [1], [1]]
    assert batches(results) == together or ("ring" in axes and batches(results) == apart)
    assert whole(results) == expected
    finished = {place: event.result for place, event in seen if isinstance(event, Finished)}
    assert files(finished[place] for place in range(4)) == files(results), "the event has the pictures too"


def test_replicas_share_the_pictures_of_several_requests(tiny_recipe):
    with Engine.load(tiny_recipe) as engine:
        expected = one_at_a_time(engine)
    seen = []
    with Engine.load(tiny_recipe, {"layout.data": 2, "batch": 4}) as engine:
        results = engine.generate_all(REQUESTS, on_event=lambda place, event: seen.append((place, event)))
        steps = dict.fromkeys(range(2), 0)

        def heard(place, event):
            steps[place] += isinstance(event, Stepped)

        many = [Request("a red apple", images=100), Request("make it blue")]
        outcomes = engine.generate_all(
            many, on_event=heard, cancelled=lambda place: not place and steps[0] > 1
        )
    assert whole(results) == expected
    assert batches(results) == [[3, 3], [3], [1], [1]], "three pictures for one, two for the other"
    finished = {place: event.result for place, event in seen if isinstance(event, Finished)}
    assert files(finished[place] for place in range(4)) == files(results)
    assert isinstance(outcomes[0], CancelledError)
    assert len(outcomes[1].images) == 1


def test_one_rank_whose_bits_change_keeps_all_of_them_from_it(tiny_recipe, shelf):
    shelf.install("one_rank", FAULTY)
    with Engine.load(tiny_recipe, {"device.backend": "one_rank", "layout.tensor": 2, "batch": 4}) as engine:
        expected = one_at_a_time(engine)
        for _ in range(2):
            results = engine.generate_all(REQUESTS)
            assert batches(results) == [[1, 1], [1], [1], [1]]
            assert "came out otherwise here" in results[0].notes[-1]
            assert whole(results) == expected


def test_who_is_cancelled_leaves_a_batch_of_two_ranks_and_no_rank_is_lost(tiny_recipe):
    requests = [Request("a red apple", images=100), Request("a red apple", seed=5)]
    with Engine.load(tiny_recipe, {"layout.ulysses": 2, "batch": 4}) as engine:
        pids = [report.process for report in engine.reports]
        steps = dict.fromkeys(range(2), 0)

        def heard(place, event):
            steps[place] += isinstance(event, Stepped)

        outcomes = engine.generate_all(
            requests, on_event=heard, cancelled=lambda place: place == 0 and steps[0] > 4
        )
        assert isinstance(outcomes[0], CancelledError)
        assert files([outcomes[1]]) == files([engine.generate(requests[1])])
        assert [report.process for report in engine.reports] == pids


PROGRAM = """
import hashlib, sys
from portable_dit import Engine, Request

requests = [
    Request("a red apple", seed=1, images=2),
    Request("make it blue", seed=5),
    Request("a red apple", size=(1, 1)),
    Request("a red apple", seed=3, size=(64, 64)),
]
keys = {"executor": "torchrun", "layout.data": 2, "batch": 4}
with Engine.load(sys.argv[1], keys) as engine:
    outcomes = engine.generate_all(requests)
    last = [type(event).__name__ for event in engine.stream("a red apple")][-1]
    kinds = [type(one).__name__ for one in outcomes]
    found = [[hashlib.sha256(image.pixels.tobytes()).hexdigest()[:16], image.batch]
             for one in outcomes if kinds and hasattr(one, "images") for image in one.images]
    # One write, so that no other rank's line stands inside.
    sys.stdout.write(f"told {engine.leads} {last} {kinds} {found}\\n")
"""


def test_processes_of_torchrun_draw_several_requests_side_by_side(tiny_recipe, tmp_path):
    """Two replicas: three pictures for the first, one for the second, and everything at the first."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        Path(sys.executable).with_name("torchrun"),
        "--nproc-per-node",
        2,
        "--master-addr",
        "127.0.0.1",
    ]
    done = subprocess.run(
        [str(word) for word in (*command, "--master-port", port, program, tiny_recipe)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    told = {
        words[1]: words for line in done.stdout.splitlines() if (words := line.split(" ", 3))[0] == "told"
    }
    with Engine.load(tiny_recipe) as engine:
        wanted = [engine.generate(REQUESTS[0]), engine.generate(REQUESTS[1]), engine.generate(REQUESTS[3])]
    digests = [
        hashlib.sha256(image.pixels.tobytes()).hexdigest()[:16] for one in wanted for image in one.images
    ]
    found = [[digest, count] for digest, count in zip(digests, (2, 2, 1, 1), strict=True)]
    kinds = ["Result", "Result", "RequestError", "Result"]
    assert told["True"][2:] == ["Finished", f"{kinds} {found}"]
    assert told["False"][2:] == ["Finished", f"{kinds} []"]


class Agreeing:
    """What `Batches` asks of a mesh, for one of two ranks that are threads."""

    def __init__(self, rank: int, said: list[bool], meet: Barrier) -> None:
        self.rank, self.said, self.meet = rank, said, meet

    def all(self, wish: bool) -> bool:
        self.said[self.rank] = wish
        self.meet.wait()
        both = all(self.said)
        self.meet.wait()
        return both


class Same:
    blocks = (lambda hidden: hidden,)

    def join(self, arguments):
        return ()


def test_guidance_branches_of_which_one_has_too_few_rows_to_compare_refuse_together():
    """Their prompts take other numbers of rows, so one rank may object to what the other would compare."""
    enough, said, meet = LEAST_VALUES[torch.bfloat16] // MOST_DRAWINGS, [True, True], Barrier(2, timeout=60)

    def objection(rank: int) -> str | None:
        batches = Batches(Agreeing(rank, said, meet))
        rows = torch.zeros(1, 1, enough - rank, dtype=torch.bfloat16)
        assert batches.is_open("a shape", 2)
        batches.compare("a shape", [Same(), Same()], [(rows, ())] * 2, run_blocks)
        assert not batches.is_open("a shape", 2)
        return batches.objection("a shape", 2)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(objection, range(2))
    assert first == "another rank objects"
    assert "so few numbers in bfloat16" in second
