"""The accounts of a device's captured graphs, over a stand-in for torch's module of a device.

The stand-in does what torch's allocator does with pools: captures into one pool use what is free in it, a
pool is given back when the last graph in it is gone, and must not be captured into any more from then on.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch

from portable_dit.accelerator import GraphPool, GraphStyle
from portable_dit.errors import BackendError

HOST = torch.device("cpu")


class Nothing:
    """A stream or an event of a device that does everything at once."""

    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass

    wait_event = record = wait_stream

    def synchronize(self):
        pass


class Module:
    """torch's module of the device. total: its bytes."""

    Stream = Event = Nothing

    def __init__(self, total=1000):
        self.total = total
        self.pools = {}  # number -> [bytes, graphs alive, given back]
        self.idle = 0  # cached, of no pool
        self.into = None
        module = self

        class Graph:
            pool = None

            def replay(self):
                assert not module.pools[self.pool][2], "its memory was given back"

            def __del__(self):
                if self.pool is not None:
                    module.pools[self.pool][1] -= 1

        self.Graph = Graph

    def graph_pool_handle(self):
        self.pools[len(self.pools)] = [0, 0, False]
        return len(self.pools) - 1

    def memory_reserved(self, device):
        return self.idle + sum(nbytes for nbytes, _, given_back in self.pools.values() if not given_back)

    def empty_cache(self):
        self.idle = 0
        for pool in self.pools.values():
            pool[2] = pool[2] or (pool[0] > 0 and pool[1] == 0)

    def use(self, nbytes):
        """What a call does: it takes so many bytes to compute in, and leaves them to its pool."""
        pool = [self.idle, 0, False] if self.into is None else self.pools[self.into]
        missing = max(nbytes - pool[0], 0)
        if self.memory_reserved(None) + missing > self.total and self.into is None:
            self.empty_cache()
            missing = nbytes
        if self.memory_reserved(None) + missing > self.total:
            raise torch.OutOfMemoryError(f"{missing} bytes more")
        if self.into is None:
            self.idle += missing
        else:
            pool[0] += missing

    @contextmanager
    def graph(self, graph, *, pool, stream):
        assert not self.pools[pool][2], "captured into a pool that was given back"
        self.into = pool
        try:
            yield
            self.pools[pool][1] += 1
            graph.pool = pool
        finally:
            self.into = None

    def stream(self, stream):
        return nullcontext()

    device = stream

    def current_stream(self, device):
        return Nothing()

    def synchronize(self, device):
        pass


def a_call(module, nbytes):
    def call(x):
        module.use(nbytes)
        return x + 1

    return call


@pytest.fixture
def module():
    return Module()


@pytest.fixture
def pool(module):
    return GraphPool(module, HOST, GraphStyle("Graph"))


X = torch.zeros(5)  # 20 bytes


def test_a_capture_counts_what_it_adds_and_its_inputs(module, pool):
    assert pool.held() == 0
    large = pool.capture(a_call(module, 400), [X])
    assert pool.held() == 420
    small = pool.capture(a_call(module, 300), [X])
    assert pool.held() == 440  # it computes in what the large one left
    assert torch.equal(large(X), X + 1)
    del small
    assert pool.held() == 420
    del large
    assert pool.held() == 0


def test_memory_that_was_given_back_is_not_captured_into_again(module, pool):
    for _ in range(3):
        call = pool.capture(a_call(module, 700), [X])  # two of them would not fit
        assert pool.held() == 720
        del call
    assert module.memory_reserved(HOST) == 700


def test_letting_one_go_of_several_gives_nothing_back_but_room_for_the_next(module, pool):
    first, second = (pool.capture(a_call(module, n), [X]) for n in (300, 500))
    assert pool.held() == 540
    del second
    assert pool.held() == 520
    third = pool.capture(a_call(module, 500), [X])
    assert pool.held() == 540
    assert torch.equal(first(X), third(X))


def test_what_the_warm_up_took_is_not_counted_as_the_graphs(module, pool):
    module.use(600)
    call = pool.capture(a_call(module, 600), [X])
    assert call is not None
    assert pool.held() == 620


def test_want_of_memory_is_raised_and_leaves_what_was_captured_as_it_was(module, pool):
    first = pool.capture(a_call(module, 400), [X])
    with pytest.raises(torch.OutOfMemoryError):
        pool.capture(a_call(module, 2000), [X])
    assert pool.held() == 420

    def grows_in_the_capture(x):
        module.use(400 if module.into is None else 2000)
        return x

    with pytest.raises(torch.OutOfMemoryError):
        pool.capture(grows_in_the_capture, [X])
    assert torch.equal(first(X), X + 1)
    second = pool.capture(a_call(module, 400), [X])
    assert pool.held() == 840  # in memory of its own: torch goes on recording into the other
    assert second is not None


def test_a_call_that_cannot_be_captured_is_refused_and_what_it_took_is_counted(module, pool, caplog):
    first = pool.capture(a_call(module, 100), [X])

    def waits(x):
        module.use(300)
        if module.into is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return x

    assert pool.capture(waits, [X]) is None
    assert "not permitted" in caplog.text
    assert pool.held() == 320
    del first
    assert pool.held() == 0


def test_where_a_failed_capture_is_the_end_of_the_device_it_is_told_so(module):
    pool = GraphPool(module, HOST, GraphStyle("Graph", fatal=True))

    def fails(x):
        if module.into is not None:
            raise RuntimeError("no")
        return x

    with pytest.raises(BackendError, match="--enforce-eager"):
        pool.capture(fails, [X])
