"""The same pictures when torchrun starts the processes, and replicas that share the work."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from portable_dit import Engine, Request
from portable_dit.errors import RecipeError
from portable_dit.result import Drawn
from portable_dit.setup import set_up

PATIENCE = 200
TORCHRUN = Path(sys.executable).with_name("torchrun")


@pytest.fixture(scope="module")
def alone(tiny_recipe):
    """Three pictures of one process."""
    with Engine.load(tiny_recipe) as engine:
        return [image.pixels for image in engine.generate(Request("a red apple", images=3)).images]


def test_replicas_share_the_images_of_a_request_and_draw_side_by_side(tiny_recipe, alone):
    with Engine.load(tiny_recipe, {"layout.data": 2}) as engine:
        assert engine.places == 2
        drawn = []
        result = engine.generate(Request("a red apple", images=3), on_event=drawn.append)
        assert [image.seed for image in result.images] == [0, 1, 2]
        for image, pixels in zip(result.images, alone, strict=True):
            assert np.array_equal(image.pixels, pixels)
        assert sorted(event.image for event in drawn if isinstance(event, Drawn)) == [0, 1, 2]
        both: dict[int, np.ndarray] = {}

        def one(seed: int) -> None:
            both[seed] = engine.generate(Request("a red apple", seed=seed)).images[0].pixels

        threads = [threading.Thread(target=one, args=(seed,)) for seed in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(np.array_equal(both[seed], alone[seed]) for seed in (0, 1))


def has_ended(process: psutil.Process) -> bool:
    """Whether it has ended, reaped by its parent or not."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_one_replica_that_dies_does_not_take_the_other_along(tiny_recipe, alone):
    with Engine.load(tiny_recipe, {"layout.data": 2}) as engine:
        first, second = (report.process for report in engine.reports)
        victim = psutil.Process(first)
        victim.kill()
        while not has_ended(victim):
            time.sleep(0.01)
        for _ in range(2):  # one is drawn by the survivor, one by the replica that starts again
            assert np.array_equal(engine.generate("a red apple").images[0].pixels, alone[0])
        assert second in [report.process for report in engine.reports]
        assert first not in [report.process for report in engine.reports]


def torchrun(*words: object, processes: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [TORCHRUN, "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", processes]
    command += ["-m", "portable_dit", "run", "--prompt", "a red apple"]
    command += ["--distributed-executor-backend", "torchrun", *words]
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=PATIENCE, env=environment
    )


def test_torchrun_draws_the_same_pictures_and_one_rank_writes_them(tiny_recipe, alone, tmp_path):
    words = ("--recipe", tiny_recipe, "--usp", 2, "--set", "layout.data=2", "-n", 3)
    done = torchrun(*words, "-o", tmp_path / "apple.png", processes=4)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / f"apple-{n}.png") for n in (1, 2, 3)]
    for number, pixels in enumerate(alone, 1):
        with Image.open(tmp_path / f"apple-{number}.png") as picture:
            assert np.array_equal(np.array(picture), pixels)


def test_torchrun_is_told_apart_from_its_absence(tiny_recipe, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RecipeError, match="not started by torchrun"):
        Engine.load(tiny_recipe, {"layout.ulysses": 2, "executor": "torchrun"})


def test_ray_that_is_not_installed_is_told_with_what_to_type(tiny_recipe, monkeypatch):
    import portable_dit.setup

    absent = lambda name: None if name == "ray" else find_spec(name)  # noqa: E731
    monkeypatch.setattr(portable_dit.setup, "find_spec", absent)
    with pytest.raises(RecipeError, match=r"pip install 'portable-dit\[ray\]'"):
        set_up(tiny_recipe, {"executor": "ray"})
