"""The contract of a backend, executable: every method has a short, correct, plain-PyTorch body.

The body is the documentation, the fallback and the oracle at once. A vendor subclasses `Backend`, overrides
what its device does better, and returns the instance from the `portable_dit_backends` hook. Kernels are
listed best first; the plan takes the first one that accepts a request and records why the others did not,
so the hot path holds a bound function and asks nothing. What kernels are is in kernels.py; they are imported
from here, as everything that a vendor needs.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from portable_dit import host
from portable_dit.capabilities import Capabilities, Device, KernelLists
from portable_dit.errors import BackendError, near
from portable_dit.formats import FORMATS, QUANTIZED, format_named
from portable_dit.kernels import (
    PLAIN,
    AttentionKernel,
    EmulatedLinear,
    ExpertKernel,
    FusedOp,
    LinearKernel,
    Packed,
)

__all__ = [
    "API_VERSION",
    "PLAIN",
    "AttentionKernel",
    "Backend",
    "EmulatedLinear",
    "ExpertKernel",
    "ExtraKernels",
    "FusedOp",
    "Lane",
    "LinearKernel",
    "Mark",
    "Packed",
    "is_short_of_memory",
]

API_VERSION = 1
T = TypeVar("T")


def is_short_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that memory ran out; vendors word it their way."""
    while error is not None:
        words = str(error).lower()
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and ("out of memory" in words or "allocate memory" in words):
            return True
        error = error.__cause__ or error.__context__
    return False


class Mark:
    """A point in the work of a lane, given out by `Lane.mark`. A vendor's holds its event."""


class Lane:
    """A queue of device work, and the only way to order two of them: streams and events in one, never to be
    mixed.

    This one runs everything at once in the caller, which is what a CPU does; waiting is then already over.
    """

    def run(self, function: Callable[[], T]) -> T:
        """Queues the device work of function on this lane."""
        return function()

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Queues a copy between tensors of equal shape and dtype; source must live until the copy is done."""
        destination.copy_(source)

    def mark(self) -> Mark:
        """A mark after everything queued so far."""
        return Mark()

    def wait(self, mark: Mark) -> None:
        """Work queued here from now on starts only when the mark is reached; the host does not block."""


@dataclass(frozen=True)
class ExtraKernels:
    """Kernels of other plugins, listed after the backend's own: installing one must not change a picture."""

    attention: tuple[AttentionKernel, ...] = ()
    linear: tuple[LinearKernel, ...] = ()
    fused: tuple[FusedOp, ...] = ()


@dataclass(frozen=True)
class _Lists:
    attention: Sequence[AttentionKernel]
    linear: Mapping[str, Sequence[LinearKernel]] = field(default_factory=dict)
    experts: Mapping[str, Sequence[ExpertKernel]] = field(default_factory=dict)
    fused: Mapping[str, Sequence[FusedOp]] = field(default_factory=dict)


class Backend:
    """One kind of device. These bodies are right for the host's own processor.

    id: what a recipe calls it. api_version: set it to the literal number that the plugin was written for;
    it has no value here on purpose, so that an old plugin cannot claim to be new.
    """

    id: str
    api_version: int
    extra: ExtraKernels = ExtraKernels()

    def devices(self) -> list[Device]:
        """The devices that are there. Cheap, free of side effects, [] when there are none."""
        free_total = host.memory()
        return [Device(self.id, 0, "cpu", "host processor", "plain", free_total[1])]

    def absence(self) -> str | None:
        """Why `devices()` is empty: the driver, the build of torch. None when it is not, or nobody knows."""
        return None

    def capabilities(self, device: Device) -> Capabilities:
        """What the device can do, probed."""
        return Capabilities(
            device=device,
            count=len(self.devices()),
            dtypes=frozenset({"float32"}),
            host_shares_memory=True,
            host_bytes=host.memory()[1],
        )

    def activate(self, device: Device) -> None:
        """Makes it this process's current device; heavy imports happen here and not before."""

    def memory(self, device: Device) -> tuple[int, int] | None:
        """(free, total) bytes; None when the driver does not say."""
        return host.memory()

    def peak_bytes(self, device: Device, *, reset: bool = False) -> int | None:
        """Highest bytes in use since the start or the last reset, read before it is reset."""
        return host.peak_bytes(reset=reset)

    def limit_memory(self, device: Device, nbytes: int) -> bool:
        """From now on this process has at most nbytes of the device; False where no limit can be set.

        Raises BackendError for a limit that the device cannot have.
        """
        return False

    def energy_joules(self, device: Device) -> float | None:
        """What the device has used since some moment in the past; None when it does not say."""
        return None

    def synchronize(self, device: Device) -> None:
        """Returns when all queued work of the device is done."""

    def trim(self, device: Device) -> None:
        """Gives memory that nothing uses back to the system."""
        gc.collect()

    def compute_lane(self, device: Device) -> Lane:
        """The lane that models run on."""
        return Lane()

    def lane(self, device: Device) -> Lane:
        """A further lane, for copies beside the computation; where there are none, one that runs inline."""
        return Lane()

    def host_buffer(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] on the host from which copies to the device are fast.

        It must cost nbytes: an allocator that pins in powers of two turns 41 GiB of blocks into 53.
        """
        return torch.empty(nbytes, dtype=torch.uint8)

    def graph(
        self, function: Callable[..., Tensor], example_inputs: Sequence[Tensor]
    ) -> Callable[..., Tensor] | None:
        """The function captured for replay with inputs of these shapes, bit for bit equal; None = call it
        eagerly.

        What it returns is the caller's to keep: the next replay does not change it. When the device has no
        room for it, nothing is captured and an error is raised that `is_short_of_memory` knows.
        """
        return None

    def graph_bytes(self, device: Device) -> int:
        """Device memory that captured calls hold, of those that are not let go; 0 when nobody counts."""
        return 0

    def process_group(self, device: Device) -> dict[str, Any]:
        """Keyword arguments for torch.distributed.init_process_group on such devices."""
        return {"backend": "gloo"}

    def cluster_resources(self) -> Mapping[str, float]:
        """What a cluster's scheduler (Ray) calls one such device, and how much of it a rank takes."""
        return {"CPU": 1.0}

    def attention_kernels(self) -> Sequence[AttentionKernel]:
        """Best first. The plain body in ops.py comes after them and need not be listed."""
        return ()

    def linear_kernels(self) -> Mapping[str, Sequence[LinearKernel]]:
        """Best first, by format. Dequantising comes after them and need not be listed."""
        return {}

    def expert_kernels(self) -> Mapping[str, Sequence[ExpertKernel]]:
        """Best first, by format. Linear kernels, expert by expert, come after them and need not be listed."""
        return {}

    def fused_ops(self) -> Mapping[str, Sequence[FusedOp]]:
        """Best first, by seam name. Each entered with a measured win over the plain body."""
        return {}

    # What the engine calls; not for overriding.

    def with_extra(self, extra: ExtraKernels) -> Backend:
        """This backend with the kernels of other plugins behind its own."""
        other = copy.copy(self)
        other.extra = extra
        return other

    def kernel_lists(self) -> KernelLists:
        """All kernels as the plan reads them: own, those of plugins, and for linear formats the plain one."""
        lists = self._lists()
        return KernelLists(lists.attention, lists.linear, lists.experts, lists.fused)

    def attention_kernel(self, id: str) -> AttentionKernel:
        return _named(id, self._lists().attention, f"{self.id}: attention kernel")

    def linear_kernel(self, format: str, id: str) -> LinearKernel:
        return _named(
            id, self._lists().linear[format_named(format).name], f"{self.id}: {format} linear kernel"
        )

    def expert_kernel(self, format: str, id: str) -> ExpertKernel:
        return _named(
            id, self._lists().experts[format_named(format).name], f"{self.id}: {format} expert kernel"
        )

    def fused_op(self, op: str, id: str) -> FusedOp:
        return _named(id, self._lists().fused.get(op, ()), f"{self.id}: {op} kernel")

    def _lists(self) -> _Lists:
        own_linear, own_fused = self.linear_kernels(), self.fused_ops()
        linear = {
            name: (
                *own_linear.get(name, ()),
                *(k for k in self.extra.linear if k.format.name == name),
                LinearKernel(name),
            )
            for name in (*QUANTIZED, *(f for f in own_linear if f in FORMATS and f not in QUANTIZED))
        }
        own_experts = self.expert_kernels()
        experts = {
            name: (*own_experts.get(name, ()), *(ExpertKernel(kernel) for kernel in kernels))
            for name, kernels in linear.items()
        }
        ops = dict.fromkeys((*own_fused, *(k.op for k in self.extra.fused)))
        fused = {op: (*own_fused.get(op, ()), *(k for k in self.extra.fused if k.op == op)) for op in ops}
        return _Lists((*self.attention_kernels(), *self.extra.attention), linear, experts, fused)


K = TypeVar("K", AttentionKernel, LinearKernel, ExpertKernel, FusedOp)


def _named(id: str, kernels: Sequence[K], what: str) -> K:
    for kernel in kernels:
        if kernel.id == id:
            return kernel
    raise BackendError(f"{what} {id!r} does not exist.{near(id, [kernel.id for kernel in kernels])}")
