"""Traffic: how many bytes a rank sends to others in one denoise step, by kind of exchange.

Counted for the rank with the longest part of the rows, by what the usual algorithms send: a ring for sums
and gathers, everything but one's own part for all-to-all. `tests/parallel` compares it with what a counting
group saw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from portable_dit.layout import Layout
from portable_dit.models.spec import DTYPE_BYTES, ModelSpec, Workload


def bytes_sent_in_a_step(
    spec: ModelSpec, workload: Workload, layout: Layout, dtype: str, *, branches: int
) -> Mapping[str, int]:
    """Kind of exchange -> bytes, without those that nothing is sent in.

    dtype: of the activations. branches: guidance branches that the request evaluates.
    """
    item, parts = DTYPE_BYTES[dtype], layout.ulysses * layout.ring
    batch = 1 if layout.guidance > 1 else branches
    whole = spec.rows(workload) // spec.guidance_branches
    rows = -(-whole // parts)
    sent = {
        "all_to_all": spec.num_blocks * _ulysses(spec, layout, whole, rows) * batch * item,
        "send": spec.num_blocks * _ring(spec, layout, whole) * batch * item,
        "all_reduce": spec.num_blocks * _sums(spec, layout) * rows * spec.hidden_size * batch * item,
        "all_gather": (parts - 1) * rows * spec.hidden_size * batch * item,
    }
    if layout.guidance > 1 and branches > 1:
        sent["all_gather"] += 4 * spec.latent_values(workload.width, workload.height)
    return {kind: round(size) for kind, size in sent.items() if size}


def _ulysses(spec: ModelSpec, layout: Layout, whole: int, rows: int) -> float:
    """Values of one block: queries, keys and values out to the heads' ranks, results back to the rows'."""
    degree = layout.ulysses
    if degree == 1:
        return 0
    heads, keys = _heads(spec, layout)
    near = sum(_lengths(whole, degree * layout.ring)[:degree])  # rows of this place of the ring
    away = (degree - 1) / degree
    return spec.head_dim * (rows * (heads + 2 * keys) * away + (near - rows) * heads / degree)


def _ring(spec: ModelSpec, layout: Layout, whole: int) -> int:
    """Values of one block: keys and values of every place but the last pass through each rank."""
    if layout.ring == 1:
        return 0
    _, keys = _heads(spec, layout)
    lengths = _lengths(whole, layout.ulysses * layout.ring)
    places = [sum(lengths[p * layout.ulysses : (p + 1) * layout.ulysses]) for p in range(layout.ring)]
    # The first place sends its own, then what came from the last, and so on.
    passed = places[0] + sum(places[2:])
    return 2 * passed * spec.head_dim * keys // layout.ulysses


def _sums(spec: ModelSpec, layout: Layout) -> float:
    """How often a block's rows are sent for sums over the tensor group."""
    degree = layout.tensor
    sums = sum(split.component == "dit" and split.along == "in" for split in spec.tensor_plan)
    return sums * 2 * (degree - 1) / degree


def _heads(spec: ModelSpec, layout: Layout) -> tuple[int, int]:
    """(query heads, key heads) of one tensor part; key heads fewer than the ranks are copied."""
    heads, keys = spec.num_heads // layout.tensor, max(spec.num_kv_heads // layout.tensor, 1)
    return heads, keys * (layout.ulysses // math.gcd(keys, layout.ulysses))


def _lengths(count: int, parts: int) -> list[int]:
    return [count // parts + (part < count % parts) for part in range(parts)]
