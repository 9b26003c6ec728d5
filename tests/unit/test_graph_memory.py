"""The memory of captured calls: a limit that holds, who goes first, and what happens when there is none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from apart_device import ApartBackend
from hypothesis import given, settings
from hypothesis import strategies as st

from portable_dit.graphs import Graphs

# A call of n numbers of float32 holds 8 n bytes for what goes in and comes out, and 16 n to compute in.
LIVE, SCRATCH = 8, 16
WHOLE = LIVE + SCRATCH


def made(limit: int | None = None, **device):
    backend = ApartBackend(**device)
    graphs = Graphs(backend, backend.devices()[0])
    graphs.begin(limit)
    return backend, graphs


def call(graphs: Graphs, numbers: int) -> None:
    """One tile of so many numbers, through a graph or not."""
    tiles = torch.arange(float(numbers))[None]
    assert torch.equal(graphs.tiles(lambda x: x * 2 + 1, tiles, 1), tiles * 2 + 1)


def captures(backend: ApartBackend) -> list[int]:
    """The sizes that were captured, in order."""
    return [shapes[0][1] for shapes in backend.captured]


def test_the_call_that_was_not_used_for_longest_goes_first():
    backend, graphs = made(limit=3 * 1024 * WHOLE)
    for numbers in (1024, 1023, 1022, 1024, 1021):
        call(graphs, numbers)
    assert captures(backend) == [1024, 1023, 1022, 1021]
    for numbers in (1024, 1022, 1021):
        call(graphs, numbers)  # all still there
    assert len(backend.captured) == 4
    call(graphs, 1023)
    assert captures(backend)[4:] == [1023]


@settings(max_examples=150, deadline=None)
@given(
    order=st.lists(st.sampled_from([1, 5, 64, 512, 700, 1024, 4096]), min_size=1, max_size=14),
    limit=st.sampled_from([1, 20, 3000, 12_000, 16_384, 30_000, 100_000]),
    shares=st.booleans(),
    room=st.sampled_from([None, 20_000, 50_000]),
)
def test_the_limit_holds_for_any_order_of_sizes(order, limit, shares, room):
    backend, graphs = made(limit, shares=shares, room=room)
    for numbers in order:
        call(graphs, numbers)
        assert backend.held() <= limit
        if not graphs.refused:
            continue
        alone, others = made(limit, shares=shares, room=room)
        call(others, numbers)
        assert alone.held() == 0, "what fits alone is captured, whatever came before"
        graphs.begin(limit)


def test_calls_that_share_memory_cost_the_largest_and_not_the_sum():
    apart, one = made()
    shared, other = made(shares=True)
    for graphs in (one, other):
        for numbers in (1024, 512, 256):
            call(graphs, numbers)
    assert shared.held() == LIVE * (1024 + 512 + 256) + SCRATCH * 1024
    assert apart.held() == WHOLE * (1024 + 512 + 256)


def test_where_memory_is_shared_all_go_and_the_large_one_that_stays_has_room_for_the_small():
    """Small ones first take more, since a large one finds no place in what they left."""
    limit = LIVE * (1024 + 512 + 256) + SCRATCH * 1024
    backend, graphs = made(limit, shares=True)
    for numbers in (256, 512, 1024):
        call(graphs, numbers)
    assert captures(backend) == [256, 512, 1024, 1024]  # the last once more, without the others
    assert backend.held() == WHOLE * 1024
    for numbers in (256, 512, 1024, 256, 512):
        call(graphs, numbers)
    assert captures(backend)[4:] == [256, 512]
    assert backend.held() == limit
    assert not graphs.refused


def test_a_later_request_with_less_memory_lets_calls_go_and_one_with_more_tries_again():
    backend, graphs = made(limit=2000 * WHOLE)
    for numbers in (1024, 512, 256):
        call(graphs, numbers)
    graphs.begin(1000 * WHOLE)
    assert backend.held() == WHOLE * (512 + 256)
    call(graphs, 2048)
    assert graphs.refused.keys() == {"vae"}
    assert len(backend.captured) == 4  # what it would hold is known when it is captured
    graphs.begin(1000 * WHOLE)
    assert not graphs.refused
    call(graphs, 2048)
    assert graphs.refused.keys() == {"vae"}
    assert len(backend.captured) == 4  # and not tried again
    graphs.begin(2048 * WHOLE)
    call(graphs, 2048)
    assert not graphs.refused
    assert captures(backend)[4:] == [2048]


def test_a_plan_that_leaves_nothing_captures_nothing():
    backend, graphs = made(limit=0)
    call(graphs, 8)
    assert not backend.captured
    assert "graphs.memory_gib" in graphs.refused["vae"]


def test_a_capture_without_room_takes_that_of_the_others():
    backend, graphs = made(room=1500 * WHOLE)
    call(graphs, 1024)
    call(graphs, 1023)
    assert captures(backend) == [1024, 1023, 1023]
    assert not graphs.refused
    call(graphs, 2048)
    assert "no memory left" in graphs.refused["vae"]
    assert backend.held() == 0


def test_what_is_no_want_of_memory_is_not_swallowed():
    _, graphs = made()
    call(graphs, 16)

    def fails():
        raise RuntimeError("an illegal instruction was met")

    with pytest.raises(RuntimeError, match="illegal"):
        graphs.with_room(fails)
    call(graphs, 16)
    assert graphs.let_go == ()


def test_a_call_that_finds_no_room_is_made_once_more_without_captured_calls():
    backend, graphs = made()
    call(graphs, 16)

    def crowded():
        if backend.held():
            raise RuntimeError("CUDA-like words: out of memory, tried to allocate 2 GiB")
        return "done"

    assert graphs.with_room(crowded) == "done"
    assert len(graphs.let_go) == 1
    graphs.begin()
    assert graphs.let_go == ()
    with pytest.raises(MemoryError):
        graphs.with_room(lambda: (_ for _ in ()).throw(MemoryError("for good")))


def test_ranks_that_exchange_inside_their_blocks_capture_together_or_not_at_all():
    """One of the two has less memory. Blocks run a different number of times in a capture than in an eager
    call, so a rank that captured alone would wait for the other for ever.
    """
    meet, said = Barrier(2, timeout=60), [True, True]

    def agreement(rank: int):
        def agree(yes: bool) -> bool:
            said[rank] = yes
            meet.wait()
            both = all(said)
            meet.wait()
            return both

        return agree

    def run(rank: int) -> list[int]:
        backend = ApartBackend(shares=rank == 1, room=1100 * WHOLE if rank == 0 else None)
        graphs = Graphs(backend, backend.devices()[0], agree=agreement(rank), max_live=3)
        ran, counts = [], []

        def block(hidden: torch.Tensor) -> torch.Tensor:
            ran.append(hidden.shape)
            return hidden + 1

        for limit, rows in ((2000, 8), (2000, 16), (2000, 64), (500, 8), (500, 24), (500, 24), (500, 40)):
            graphs.begin(limit * WHOLE)
            before = len(ran)
            graphs.blocks([block], torch.zeros(1, rows, 16), ())
            counts.append(len(ran) - before)
        return counts

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert first == second
    assert set(first) == {1, 2, 3}, "eager or replayed, captured, captured at the second attempt"
