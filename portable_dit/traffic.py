"""Traffic: how many bytes a rank sends to others in one denoise step, by kind of exchange.

Counted for the rank with the longest part of the rows, by what the usual algorithms send: a ring for sums
and gathers, everything but one's own part for all-to-all. `tests/parallel` compares it with what a counting
group saw.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from portable_dit.layout import Layout, sharers
from portable_dit.models.spec import DTYPE_BYTES, ModelSpec, Numbers, Workload, input_spans, matches

KINDS = ("linear", "experts")  # of layers that may run on kernels that quantise their input


def bytes_sent_in_a_step(
    spec: ModelSpec,
    workload: Workload,
    layout: Layout,
    held: Numbers,
    *,
    branches: int,
    quantizing: Collection[str] = (),
) -> Mapping[str, int]:
    """Kind of exchange -> bytes, without those that nothing is sent in.

    held: the DiT's. branches: guidance branches that the request evaluates. quantizing: which of `KINDS` run
    on a kernel that quantises its input, and so agree on scales with those that hold the rest of it.
    """
    item, parts = DTYPE_BYTES[held.dtype], layout.ulysses * layout.ring
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
    sent["all_reduce"] += sum(
        agreement.bytes for agreement in agreements(spec, layout, held, quantizing, rows * batch)
    )
    return {kind: round(size) for kind, size in sent.items() if size}


@dataclass(frozen=True)
class Agreement:
    """Ranks that tell each other float32 values in each of `count` layers, of which the largest count."""

    ranks: int
    values: int
    count: int

    @property
    def bytes(self) -> float:
        return 2 * (self.ranks - 1) / self.ranks * 4 * self.values * self.count


def agreements(
    spec: ModelSpec, layout: Layout, held: Numbers, quantizing: Collection[str], rows: int
) -> list[Agreement]:
    """What ranks tell each other in a step so that inputs are rounded as those of one device would be.

    rows: of one rank, of all its branches.
    """
    found = []
    for group in spec.linears if held.format else ():
        kind = KINDS[bool(group.experts)]
        count = sum(not matches(name, held.keep) for name in group.names())
        if group.component != "dit" or kind not in quantizing or not count:
            continue
        assert held.format is not None
        one_scale = input_spans(held.format)[0]
        if group.experts:
            values = group.experts // layout.expert if one_scale else rows * spec.experts_per_row
        else:
            values = 1 if one_scale else rows
        found += [Agreement(ranks, values, count) for ranks in sharers(group, spec, layout, held.format)]
    return found


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


def sums_in_a_block(spec: ModelSpec) -> int:
    """How many results of a block's rows are summed over the tensor group."""
    inward = [split for split in spec.tensor_plan if (split.component, split.along) == ("dit", "in")]
    return len({split.sum_at or split.pattern for split in inward})


def _sums(spec: ModelSpec, layout: Layout) -> float:
    """How often a block's rows are sent for sums over the tensor group."""
    return sums_in_a_block(spec) * 2 * (layout.tensor - 1) / layout.tensor


def _heads(spec: ModelSpec, layout: Layout) -> tuple[int, int]:
    """(query heads, key heads) of one tensor part; key heads fewer than the ranks are copied."""
    heads, keys = spec.num_heads // layout.tensor, max(spec.num_kv_heads // layout.tensor, 1)
    return heads, keys * (layout.ulysses // math.gcd(keys, layout.ulysses))


def _lengths(count: int, parts: int) -> list[int]:
    return [count // parts + (part < count % parts) for part in range(parts)]
