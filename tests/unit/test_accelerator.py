"""What all accelerators share, where it can be looked at without one: page-locked memory cut from pieces.

Lanes, graphs and memory run on mocked machines, in the vendors' tests and in the conformance suite there.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from portable_dit.accelerator import ALIGNMENT, PinnedArenas
from portable_dit.models import read_spec
from portable_dit.models.spec import Numbers, Workload

MIB = 1 << 20


def arenas(limit: int = 4 * MIB) -> tuple[PinnedArenas, list[int]]:
    """Arenas over plain memory, and the sizes that they asked for."""
    asked: list[int] = []

    def lock(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    return PinnedArenas(lock, limit), asked


@given(st.lists(st.integers(0, 3 * MIB), min_size=1, max_size=30))
def test_buffers_are_of_the_size_asked_for_aligned_and_apart(sizes):
    made, asked = arenas()
    buffers = [made.buffer(size) for size in sizes]
    for number, buffer in enumerate(buffers):
        buffer.fill_(number)
    for number, (size, buffer) in enumerate(zip(sizes, buffers, strict=True)):
        assert (buffer.numel(), buffer.dtype) == (size, torch.uint8)
        assert buffer.storage_offset() % ALIGNMENT == 0
        assert bool((buffer == number).all())
    assert all(size & (size - 1) == 0 for size in asked)


def test_the_blocks_of_h3_image_cost_little_more_than_they_are():
    """Each locked on its own, rounded up to a power of two, they would cost a third more."""
    dit = read_spec("h3-image", "random").bytes_on_device("dit", Workload(2048, 2048, 512), Numbers())
    asked: list[int] = []

    def lock(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    made = PinnedArenas(lock)
    for _ in range(dit.num_blocks):
        made.buffer(dit.block)
    real = dit.block * dit.num_blocks
    assert dit.num_blocks * (1 << (dit.block - 1).bit_length()) > 1.3 * real
    assert sum(asked) < 1.1 * real


def test_a_piece_lives_as_long_as_a_buffer_in_it_and_no_longer():
    pieces: list[weakref.ref[torch.UntypedStorage]] = []

    def lock(nbytes: int) -> torch.Tensor:
        piece = torch.zeros(nbytes, dtype=torch.uint8)
        pieces.append(weakref.ref(piece))
        return piece

    made = PinnedArenas(lock, 4 * MIB)
    buffer = made.buffer(MIB)
    made.let_go()
    gc.collect()
    buffer.fill_(7)
    assert bool((buffer == 7).all())
    again = made.buffer(MIB)
    assert len(pieces) == 2, "what was let go is given to nobody"
    assert again.data_ptr() != buffer.data_ptr()


def test_memory_that_the_system_does_not_lock_is_refused_with_the_way_out(monkeypatch):
    from portable_dit.accelerator import _locked
    from portable_dit.errors import BackendError

    if torch.accelerator.is_available():
        pytest.skip("this torch locks memory")
    with pytest.raises(BackendError, match=r"page-locking .*ulimit -l.*offload.resident_blocks"):
        _locked(MIB)
