"""The engine still draws the stored pictures; refresh them with `make golden` when the weights are new."""

from __future__ import annotations

import numpy as np
import pytest

from portable_dit.engine import Engine
from training.golden import GOLDENS, LEAST_DB, Golden, distance_db, draw_golden, golden_weights, read_golden
from training.shipped import GOLDEN, weights_digest


@pytest.fixture(scope="module")
def engine():
    with Engine.load("cpu/h3-mini", {"precision": "float32"}) as loaded:
        yield loaded


def test_the_stored_pictures_are_of_the_shipped_weights() -> None:
    assert golden_weights() == weights_digest(), "new weights: run `make release-h3-mini`, or `make golden`"


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_the_engine_draws_the_golden_picture(golden: Golden, engine: Engine) -> None:
    assert distance_db(draw_golden(engine, golden, GOLDEN), read_golden(golden)) >= LEAST_DB


def test_another_seed_or_a_shift_of_one_pixel_is_not_the_golden_picture(engine: Engine) -> None:
    stored = read_golden(GOLDENS[0])
    other = Golden("one", GOLDENS[0].prompt, GOLDENS[0].seed + 1)
    assert distance_db(draw_golden(engine, other, GOLDEN), stored) < LEAST_DB
    assert distance_db(np.roll(stored, 1, axis=1), stored) < LEAST_DB
