"""Captured blocks that hold exchanges: ranks capture together, though one of them has less room.

A rank runs the blocks once more where it captures them, so two that decided apart would wait for each other.
"""

from __future__ import annotations

import numpy as np
import pytest

from portable_dit import Engine, Request

# The second rank holds four times as much with every captured call.
UNEVEN = """
import torch.distributed as dist
from apart_device import ApartBackend
from portable_dit.capabilities import GraphLimits
from portable_dit.hooks import hookimpl

class Uneven(ApartBackend):
    def graph_bytes(self, device):
        second = dist.is_initialized() and dist.get_rank() % 2 == 1
        return super().graph_bytes(device) * (4 if second else 1)

@hookimpl
def portable_dit_backends():
    return [Uneven(GraphLimits(supported=True, default_on=True, collectives=True), shares={shares})]
"""
SIZES = ((96, 64), (128, 96), (64, 64), (96, 64))
REQUESTS = [Request("a red apple", size=size, seed=7) for size in SIZES]


@pytest.mark.parametrize(
    ("layout", "shares"),
    [({"layout.ulysses": 2}, True), ({"layout.tensor": 2, "layout.vae_tiles": 2}, False)],
)
def test_two_ranks_of_which_one_has_less_room_draw_what_they_draw_eagerly(shelf, tiny_recipe, layout, shares):
    """With room for no call, all is drawn eagerly; then with room for some."""
    shelf.install("apart", UNEVEN.format(shares=shares))
    keys = {**layout, "device.backend": "apart", "rank_timeout_seconds": 40.0}
    pictures, eager = [], []
    for memory in (1e-6, 5e-4):
        with Engine.load(tiny_recipe, {**keys, "graphs.memory_gib": memory}) as engine:
            results = [engine.generate(request) for request in REQUESTS]
        pictures.append([result.images[0].pixels for result in results])
        eager.append(sum(any("graphs.dit" in change for change in result.changes) for result in results))
    assert eager == [len(REQUESTS), 0]
    for one, other in zip(*pictures, strict=True):
        assert np.array_equal(one, other)
