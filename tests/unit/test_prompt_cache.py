"""Text states of earlier requests: kept by content, within their bytes, and never wrong."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from portable_dit import Engine, Request
from portable_dit.drawing import KEPT
from portable_dit.prompt_cache import PromptCache


@dataclass(frozen=True)
class States:
    states: Tensor
    tags: Tensor


def states(value: float, rows: int = 4) -> States:
    return States(torch.full((rows, 8), value), torch.zeros(rows, dtype=torch.int64))


def picture(value: int, height: int = 2, width: int = 3) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


SIZE = 4 * 8 * 4 + 4 * 8


def test_what_was_kept_comes_back_for_the_same_content_alone():
    cache = PromptCache(1 << 20, "encoder")
    cache.keep("a cat", [picture(1)], states(1.0))
    found = cache.find("a cat", [picture(1)])
    assert torch.equal(found.states, states(1.0).states)
    assert torch.equal(found.tags, states(1.0).tags)
    others = (
        ("a dog", [picture(1)]),
        ("a cat", []),
        ("a cat", [picture(2)]),
        ("a cat", [picture(1), picture(1)]),
        ("a cat", [picture(1, height=3, width=2)]),
    )
    assert all(cache.find(*other) is None for other in others)


def test_the_order_of_references_is_content():
    cache = PromptCache(1 << 20, "encoder")
    cache.keep("x", [picture(1), picture(2)], states(1.0))
    assert cache.find("x", [picture(2), picture(1)]) is None


def test_it_keeps_a_copy_that_later_writes_do_not_reach():
    cache = PromptCache(1 << 20, "encoder")
    given = states(1.0)
    cache.keep("x", [], given)
    given.states.zero_()
    assert cache.find("x", []).states.min() == 1.0


def test_the_least_recently_used_go_when_the_bytes_are_spent():
    cache = PromptCache(2 * SIZE, "encoder")
    cache.keep("a", [], states(1.0))
    cache.keep("b", [], states(2.0))
    assert cache.find("a", []) is not None
    cache.keep("c", [], states(3.0))
    assert cache.kept_bytes == 2 * SIZE
    assert cache.find("b", []) is None
    assert cache.find("a", []) is not None
    assert cache.find("c", []) is not None


@pytest.mark.parametrize("limit", [0, SIZE - 1])
def test_what_is_over_the_limit_is_not_kept(limit):
    cache = PromptCache(limit, "encoder")
    cache.keep("a", [], states(1.0))
    assert cache.kept_bytes == 0
    assert cache.find("a", []) is None


def test_a_kept_prompt_draws_the_same_picture_and_says_so(tiny_checkpoint):
    wish = {"weights": str(tiny_checkpoint)}
    request = Request("a red apple", references=(picture(9, 64, 64),))
    with Engine.load("cpu/h3-mini", wish) as engine:
        first, second = engine.generate(request), engine.generate(request)
        other = engine.generate(Request("a blue apple", references=request.references))
    assert KEPT not in first.notes
    assert KEPT in second.notes
    assert KEPT not in other.notes
    assert np.array_equal(first.images[0].pixels, second.images[0].pixels)
    assert first.images[0].record == second.images[0].record
    with Engine.load("cpu/h3-mini", {**wish, "prompt_cache_mib": 0}) as engine:
        assert all(KEPT not in engine.generate(request).notes for _ in range(2))
