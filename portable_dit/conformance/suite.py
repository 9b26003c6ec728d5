"""The suite: everything that a backend claims, tried on its device.

    report = run_suite("cpu")
    assert report.ok, report.failures

A backend is judged on its claims: what a kernel's check refuses, and what capabilities say is not there, is
listed as not claimed and counts as nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor

from portable_dit import __version__, ops
from portable_dit.backend import PLAIN, AttentionKernel, Backend, ExpertKernel, FusedOp, LinearKernel
from portable_dit.capabilities import AttentionRequest, Capabilities, Device, Reject
from portable_dit.conformance.attention import check_attention, check_log_sum_exp
from portable_dit.conformance.collectives import check_collectives
from portable_dit.conformance.divided import check_divided
from portable_dit.conformance.experts import check_expert_seams, check_experts
from portable_dit.conformance.fused import SEAMS, check_fused, check_producers
from portable_dit.conformance.graphs import check_graphs
from portable_dit.conformance.identity import check_identity
from portable_dit.conformance.linear import check_encoding, check_linear
from portable_dit.conformance.noise import check_noise
from portable_dit.conformance.outcome import REPEATS, Outcome
from portable_dit.conformance.pictures import SOAK, check_pictures, check_soak
from portable_dit.conformance.transfer import check_transfer
from portable_dit.errors import BackendError, near
from portable_dit.masks import Mask
from portable_dit.plugins import attempt, select_backend

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Trial:
    """What is tried. kernel: this one alone in the categories of kernels, None for all of them.

    repeats: runs of each kernel, the best of which is its time. soak: requests of the soak.
    """

    backend: Backend
    device: Device
    capabilities: Capabilities
    kernel: str | None = None
    repeats: int = REPEATS
    soak: int = SOAK

    @property
    def dtypes(self) -> list[str]:
        return [name for name in DTYPES if name in self.capabilities.dtypes]

    def tries(self, id: str) -> bool:
        return self.kernel in (None, id)


Check = Callable[[Trial], list[Outcome]]


class PlainAttention(AttentionKernel):
    """The body in ops.py, which runs on the device wherever no kernel takes a call."""

    id = PLAIN

    def refuse(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        return Reject("lse", "does not give the log-sum-exp") if request.return_lse else None

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
        return ops.attention(q, k, v, mask, scale=scale)


@dataclass(frozen=True)
class Report:
    """All outcomes by category, and what they are of."""

    backend: str
    device: Device
    capabilities: Capabilities
    torch: str
    version: str
    date: str
    seconds: Mapping[str, float]
    outcomes: Mapping[str, tuple[Outcome, ...]]

    @property
    def failures(self) -> tuple[Outcome, ...]:
        return tuple(o for outcomes in self.outcomes.values() for o in outcomes if o.status == "fail")

    @property
    def ok(self) -> bool:
        return not self.failures


def run_suite(
    name: str,
    *,
    categories: Sequence[str] = (),
    kernel: str | None = None,
    repeats: int = REPEATS,
    soak: int = SOAK,
    on_category: Callable[[str], None] = lambda name: None,
) -> Report:
    """Tries the backend of that name.

    categories: all, unless some are named. kernel: in the categories of kernels, the one of this id alone.
    repeats: runs of each kernel, the best of which is its time. soak: requests of the soak. on_category: told
    each in turn.

    Raises BackendError when the backend is unknown, broken or has no device here, when it has no such kernel,
    or the suite no such category.
    """
    for wanted in categories:
        if wanted not in CATEGORIES:
            raise BackendError(f"category {wanted!r}: is not in the suite.{near(wanted, list(CATEGORIES))}")
    backend = select_backend(name)
    if kernel is not None and kernel not in (ids := _kernel_ids(backend)):
        raise BackendError(f"kernel {kernel!r}: {backend.id} has none of that name.{near(kernel, ids)}")
    device = backend.devices()[0]
    backend.activate(device)
    trial = Trial(backend, device, backend.capabilities(device), kernel, repeats, soak)
    outcomes: dict[str, tuple[Outcome, ...]] = {}
    seconds: dict[str, float] = {}
    for category in [c for c in CATEGORIES if c in categories or not categories]:
        on_category(category)
        start = time.perf_counter()
        outcomes[category] = _tried(category, trial)
        seconds[category] = time.perf_counter() - start
    return Report(
        backend=backend.id,
        device=device,
        capabilities=trial.capabilities,
        torch=torch.__version__,
        version=__version__,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        seconds=seconds,
        outcomes=outcomes,
    )


def _kernel_ids(backend: Backend) -> list[str]:
    """Of all kernels that a backend lists, and of the bodies that serve where it has none."""
    lists = backend.kernel_lists()
    by_name = (lists.linear, lists.experts, lists.fused)
    listed = [*lists.attention, *(one for names in by_name for kernels in names.values() for one in kernels)]
    return sorted({PLAIN, *(one.id for one in listed)})


def _tried(category: str, trial: Trial) -> tuple[Outcome, ...]:
    """The outcomes of a category; one that breaks off is a failure, and the next is tried."""

    def run() -> list[Outcome]:
        with torch.inference_mode():
            return CATEGORIES[category](trial)

    found, raised = attempt(run)
    if found is None:
        return (Outcome(category, trial.backend.id, "broke_off", "", "fail", f"raised {raised}"),)
    return tuple(found)


def _attention(trial: Trial) -> list[Outcome]:
    backend, device, capabilities = trial.backend, trial.device, trial.capabilities
    found = []
    for kernel in (*backend.kernel_lists().attention, PlainAttention()):
        assert isinstance(kernel, AttentionKernel)
        for dtype in trial.dtypes if trial.tries(kernel.id) else ():
            found += check_attention(kernel, backend, device, capabilities, dtype, repeats=trial.repeats)
            found += check_log_sum_exp(kernel, device, capabilities, dtype)
    return found


def _linear(trial: Trial) -> list[Outcome]:
    backend, device, capabilities = trial.backend, trial.device, trial.capabilities
    found = []
    for name, kernels in backend.kernel_lists().linear.items():
        found += check_encoding(name, backend, device)
        for kernel in kernels:
            assert isinstance(kernel, LinearKernel)
            for dtype in trial.dtypes if trial.tries(kernel.id) else ():
                found += check_linear(kernel, backend, device, capabilities, dtype, repeats=trial.repeats)
                found += check_divided(kernel, device, capabilities, dtype)
    return found


def _experts(trial: Trial) -> list[Outcome]:
    backend, device, capabilities = trial.backend, trial.device, trial.capabilities
    found, lists = [], backend.kernel_lists()
    for kernel in (kernel for kernels in lists.experts.values() for kernel in kernels):
        assert isinstance(kernel, ExpertKernel)
        for dtype in trial.dtypes if trial.tries(kernel.id) else ():
            found += check_experts(kernel, backend, device, capabilities, dtype, repeats=trial.repeats)
            found += check_divided(kernel, device, capabilities, dtype)
    seams: Mapping[str, Callable[..., Any]] = {
        "route": ops.route,
        "deal": ops.deal,
        "expert_linear": ops.expert_linear,
        "combine_experts": ops.combine_experts,
    }
    for name, plain in seams.items():
        for op in (*lists.fused.get(name, ()), FusedOp(name, PLAIN, plain)):
            assert isinstance(op, FusedOp)
            for dtype in trial.dtypes if trial.tries(op.id) else ():
                found += check_expert_seams(op, backend, device, capabilities, dtype, repeats=trial.repeats)
    return found


def _fused(trial: Trial) -> list[Outcome]:
    backend, device, capabilities = trial.backend, trial.device, trial.capabilities
    found = []
    lists = backend.kernel_lists().fused
    for name, seam in SEAMS.items():
        for op in (*lists.get(name, ()), FusedOp(name, PLAIN, seam.plain)):
            assert isinstance(op, FusedOp)
            for dtype in trial.dtypes if trial.tries(op.id) else ():
                found += check_fused(op, backend, device, capabilities, dtype, repeats=trial.repeats)
                found += check_producers(op, backend, device, capabilities, dtype)
    return found


def _promises(check: Callable[[Backend, Device, Capabilities], list[Outcome]]) -> Check:
    """A category that tries no kernel by itself."""
    return lambda trial: check(trial.backend, trial.device, trial.capabilities)


CATEGORIES: Mapping[str, Check] = {
    "identity": _promises(check_identity),
    "attention": _attention,
    "linear": _linear,
    "experts": _experts,
    "fused": _fused,
    "rng": _promises(check_noise),
    "transfer": _promises(check_transfer),
    "graphs": _promises(check_graphs),
    "collectives": _promises(check_collectives),
    "end_to_end": _promises(check_pictures),
    "soak": lambda trial: check_soak(trial.backend, trial.device, requests=trial.soak),
}


def as_dict(report: Report) -> dict[str, Any]:
    """The report as JSON-able data."""
    capabilities = report.capabilities
    return {
        "backend": report.backend,
        "device": report.device.name,
        "arch": report.device.arch,
        "driver": report.device.driver,
        "torch": report.torch,
        "libraries": dict(capabilities.libraries),
        "portable_dit": report.version,
        "date": report.date,
        "ok": report.ok,
        "seconds": {name: round(value, 2) for name, value in report.seconds.items()},
        "outcomes": {name: [o.as_dict() for o in found] for name, found in report.outcomes.items()},
    }
