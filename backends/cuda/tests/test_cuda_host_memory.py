"""Page-locked buffers over a stand-in for the driver: locked whole, let go when nobody reads them."""

from __future__ import annotations

import gc

import pytest
import torch
from portable_dit_cuda.host_memory import locked_buffer

from portable_dit.errors import BackendError


class Driver:
    """cudaHostRegister and cudaHostUnregister by their arguments; answers with a status."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.status = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if self.status == 0:
            self.locked[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


@pytest.mark.parametrize("size", [1, 4096, 5_000_001])
def test_a_buffer_costs_what_was_asked(driver, size):
    buffer = locked_buffer(size)
    assert buffer.shape == (size,)
    assert buffer.dtype is torch.uint8
    assert driver.locked == {buffer.data_ptr(): size}
    buffer.fill_(7)
    assert int(buffer[-1]) == 7


def test_pages_are_let_go_with_the_last_view_of_them(driver):
    buffer = locked_buffer(10_000)
    view = buffer[100:200].view(torch.bfloat16)
    del buffer
    gc.collect()
    assert len(driver.locked) == 1
    view.fill_(1.0)
    del view
    gc.collect()
    assert driver.locked == {}


def test_a_refusal_says_what_to_do_and_unlocks_nothing(driver):
    driver.status = 2
    with pytest.raises(BackendError, match=r"CUDA error 2.*resident_blocks"):
        locked_buffer(4096)
    gc.collect()


def test_an_empty_buffer_needs_no_driver(driver):
    assert locked_buffer(0).numel() == 0
    assert driver.locked == {}
