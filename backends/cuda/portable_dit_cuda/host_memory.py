"""Page-locked host memory that costs what was asked for.

torch's own pinned allocator rounds every block up to a power of two, which turns 41 GiB of offloaded blocks
into 53. Here the pages are mapped by us and registered with the driver, so a buffer costs whole pages and no
more.
"""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

from portable_dit.errors import BackendError


class LockedPages(mmap.mmap):
    """An anonymous private mapping that the driver locks, and lets go of before the pages themselves go."""

    address = 0  # once locked

    def lock(self) -> str | None:
        """Locks all pages; says why not when the driver refuses."""
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        status = torch.cuda.cudart().cudaHostRegister(address, len(self), 0)
        if int(status) != 0:
            return f"CUDA error {int(status)}"
        self.address = address
        return None

    def __del__(self) -> None:
        # While Python shuts down the driver may be gone already, and the pages go with the process.
        if self.address and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.address)


def locked_buffer(nbytes: int) -> Tensor:
    """uint8 [nbytes] of page-locked memory. Raises BackendError when the system locks no more."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = LockedPages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock: less time at load
    refusal = pages.lock()
    if refusal is not None:
        raise BackendError(
            f"page-locking {nbytes / 2**30:.2f} GiB of host memory failed with {refusal}. Raise `ulimit -l` "
            "and the container's memory limit, or keep more blocks on the device: offload.resident_blocks."
        )
    return torch.frombuffer(pages, dtype=torch.uint8)
