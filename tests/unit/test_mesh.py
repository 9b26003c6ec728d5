"""Who belongs to whom, how rows and tiles are shared out, and the merge of a ring, without any process."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from portable_dit.backend import AttentionKernel
from portable_dit.layout import Layout
from portable_dit.masks import NO_MASK, Causal, KeyPadding, Part
from portable_dit.parallel.collectives import Group, Pulse, split_evenly
from portable_dit.parallel.mesh import partitions
from portable_dit.parallel.sequence import UlyssesAttention, _keys_of, _Merged
from portable_dit.parallel.vae import SharedTiles
from portable_dit.tiles import run_tiles

DEGREES = st.sampled_from([1, 2, 3, 4])


@given(DEGREES, DEGREES, DEGREES, st.sampled_from([1, 2]))
def test_every_rank_is_in_one_group_of_each_kind(tensor, ulysses, ring, guidance):
    layout = Layout(tensor=tensor, ulysses=ulysses, ring=ring, guidance=guidance)
    found = partitions(layout)
    for name, parts in found.items():
        assert sorted(rank for part in parts for rank in part) == list(range(layout.replica)), name
        assert len({len(part) for part in parts}) == 1
    for axis in ("tensor", "ulysses", "ring", "guidance"):
        assert len(found[axis][0]) == getattr(layout, axis)
    for part in found["tensor"]:  # what talks most is next to each other
        assert list(part) == list(range(part[0], part[0] + tensor))
    for part in found["sequence"]:  # in the order of the rows: a place of the ring has neighbours in ulysses
        for place in range(ring):
            assert part[place * ulysses : (place + 1) * ulysses] in found["ulysses"]


def test_ranks_of_one_sequence_see_one_branch_and_one_part_of_the_layers():
    found = partitions(Layout(tensor=2, ulysses=2, guidance=2, expert=2))
    assert found["guidance"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found["sequence"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert found["expert"] == found["tensor"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert found["experts_alike"] == tuple((rank,) for rank in range(8))
    assert partitions(Layout(tensor=4, expert=2))["experts_alike"] == ((0, 2), (1, 3))


@given(st.integers(0, 1000), st.integers(1, 64))
def test_shares_add_up_and_differ_by_one_at_most(count, parts):
    lengths = split_evenly(count, parts)
    assert sum(lengths) == count
    assert len(lengths) == parts
    assert max(lengths) - min(lengths) <= 1
    assert list(lengths) == sorted(lengths, reverse=True)


def alone(axis: str) -> Group:
    return Group(axis, size=1, index=0, handle=None, pulse=Pulse())


def test_a_group_of_one_sends_nothing():
    group, x = alone("tensor"), torch.arange(6.0).view(1, 3, 2)
    assert group.all_reduce(x) is x
    assert group.gather_rows(x, (3,)) is x
    assert group.gather_to_first(x[0], (3,)).equal(x[0])
    assert group.exchange(x[0], [3], [3]).equal(x[0])
    assert group.largest(x) is x


def test_rows_that_were_not_split_are_attended_whole_and_split_ones_without_an_extra_mask():
    seen = []

    def kernel(name):
        def run(q, k, v, mask, *, scale):
            seen.append((name, mask))
            return q

        return run

    attend = UlyssesAttention(alone("ulysses"), alone("ring"), kernel("part"), kernel("whole"))
    rows = torch.zeros(1, 5, 2, 4)
    attend(rows, rows, rows, Causal(), scale=1.0)
    attend(rows, rows, rows, Part(NO_MASK, (5,), 0), scale=1.0)
    assert seen == [("whole", Causal()), ("part", NO_MASK)]


@given(st.integers(1, 4), st.booleans())
def test_attention_over_parts_of_the_keys_merges_to_attention_over_all(turns, padded):
    generator = torch.Generator().manual_seed(turns)
    q, k, v = (torch.randn(2, 6, 4, 8, generator=generator) for _ in range(3))
    keep = torch.rand(2, 6, generator=generator) > 0.5
    keep[0] = False  # rows that see nothing
    mask = KeyPadding(keep) if padded else NO_MASK
    kernel = AttentionKernel()
    whole = kernel.run(q, k, v, mask, scale=0.3)
    lengths, start, merged = split_evenly(6, turns), 0, None
    for owner, length in enumerate(lengths):
        part = _keys_of(mask, lengths, owner, 0, first=owner == 0)
        found = kernel.run_with_lse(
            q, k[:, start : start + length], v[:, start : start + length], part, scale=0.3
        )
        merged = _Merged(*found) if merged is None else merged.with_more(*found)
        start += length
    assert torch.allclose(merged.out, whole, atol=1e-6)
    assert not merged.out.isnan().any()


def test_keys_that_all_places_share_are_seen_in_the_first_turn_alone():
    keep = torch.tensor([[True, False, True, True, False, False, True]])
    first = _keys_of(KeyPadding(keep), (2, 2), 1, 3, first=True)
    later = _keys_of(KeyPadding(keep), (2, 2), 0, 3, first=False)
    assert first.keep.tolist() == [[True, False, True, False, True]]
    assert later.keep.tolist() == [[True, False]]


def test_tiles_of_one_rank_are_decoded_as_they_are():
    tiles = torch.arange(10.0).view(5, 2)
    shared = SharedTiles(alone("tiles"), run_tiles)
    assert shared(lambda batch: batch * 2, tiles, 2).equal(tiles * 2)
