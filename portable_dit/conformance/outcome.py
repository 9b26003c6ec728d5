"""How a case is judged: against a float64 oracle, with twice the plain body's own error as tolerance."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from portable_dit.backend import Backend
from portable_dit.capabilities import Device
from portable_dit.plugins import attempt

LONGEST = 300  # characters of a detail
REPEATS = 3  # runs of a kernel, the best of which is its time
# Below this, the order of float32 sums and a device's exp decide: products of three tf32 parts, which are as
# good as float32 for any use, came to three times the host's error. One tf32 product is at 2^-11.
FLOAT32_FLOOR = 2.0**-18


@dataclass(frozen=True)
class Outcome:
    """One kernel, or one promise of a backend, on one case.

    not_claimed: the kernel's check refuses it, or the backend does not promise it, which is no fault. error,
    tolerance: worst row's relative error. seconds, plain_seconds: best of a few runs of the kernel and of the
    plain body, both on the device.
    """

    op: str
    kernel: str
    case: str
    dtype: str
    status: Literal["pass", "fail", "not_claimed"]
    detail: str = ""
    error: float | None = None
    tolerance: float | None = None
    seconds: float | None = None
    plain_seconds: float | None = None

    def __post_init__(self) -> None:
        if len(self.detail) > LONGEST:  # torch lists all its kernels in some messages
            object.__setattr__(self, "detail", f"{self.detail[:LONGEST]} ...")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def worst_row_error(got: Tensor, oracle: Tensor) -> float:
    """The largest |got - oracle| / |oracle| over rows (last dim), float64; inf when got has Inf or NaN.

    Rows much smaller than the others count against a thousandth of the median, so a row that must be zero has
    to be.
    """
    if got.shape != oracle.shape:
        return math.inf
    difference = (got.detach().cpu().double() - oracle).norm(dim=-1)  # a device may have no float64
    sizes = oracle.norm(dim=-1)
    nonzero = sizes[sizes > 0]
    floor = 1e-3 * nonzero.median() if nonzero.numel() else torch.tensor(1.0, dtype=torch.float64)
    error = (difference / sizes.clamp_min(floor)).max().item()
    return error if math.isfinite(error) else math.inf


def judge(
    run: Callable[[], Tensor],
    plain: Callable[[], Tensor],
    oracle: Tensor,
    *,
    plain_on_host: Callable[[], Tensor],
    op: str,
    kernel: str,
    case: str,
    dtype: str,
    backend: Backend,
    device: Device,
    repeats: int = REPEATS,
) -> Outcome:
    """Runs the kernel and compares it with the oracle (float64, on the host).

    Tolerance: twice the error that the plain body makes on the host at this dtype, since a device whose plain
    sums are wrong must not excuse itself; and never below one rounding of the dtype, since a plain body may
    happen to be exact, or 2^-18 for float32.
    """
    reference = plain_on_host()
    floor = FLOAT32_FLOOR if reference.dtype is torch.float32 else torch.finfo(reference.dtype).eps
    tolerance = max(2 * worst_row_error(reference, oracle), floor)
    outcome, reason = attempt(lambda: _timed(run, backend, device, repeats))
    if outcome is None:
        return Outcome(op, kernel, case, dtype, "fail", f"raised {reason}")
    got, seconds = outcome
    on_device, _ = attempt(lambda: _timed(plain, backend, device, repeats))
    error = worst_row_error(got, oracle)
    problems = []
    if got.shape != oracle.shape:
        problems.append(f"shape {list(got.shape)} instead of {list(oracle.shape)}")
    if got.dtype != reference.dtype:
        problems.append(f"{got.dtype} instead of {reference.dtype}")
    if not error <= tolerance:
        problems.append(f"error {error:.2e} above {tolerance:.2e}")
    return Outcome(
        op,
        kernel,
        case,
        dtype,
        status="fail" if problems else "pass",
        detail="; ".join(problems),
        error=error,
        tolerance=tolerance,
        seconds=seconds,
        plain_seconds=None if on_device is None else on_device[1],
    )


class Promises:
    """Outcomes of one category whose cases are promises of the backend rather than numbers of a kernel."""

    def __init__(self, category: str, backend: str) -> None:
        self._category = category
        self._backend = backend
        self.outcomes: list[Outcome] = []

    def check(self, case: str, broken: Callable[[], str | None], *, dtype: str = "") -> None:
        """broken: says how the promise is broken, None when it is kept. What it raises is a failure too."""
        why, raised = attempt(broken)
        problem = f"raised {raised}" if raised is not None else why
        status: Literal["pass", "fail"] = "fail" if problem else "pass"
        self.outcomes.append(Outcome(self._category, self._backend, case, dtype, status, problem or ""))

    def not_claimed(self, case: str, why: str) -> None:
        self.outcomes.append(Outcome(self._category, self._backend, case, "", "not_claimed", why))


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome to show for many of one kernel: a failure first, else the largest part of its tolerance."""
    order = {"fail": 2, "pass": 1, "not_claimed": 0}
    return max(outcomes, key=lambda o: (order[o.status], (o.error or 0.0) / (o.tolerance or 1.0)))


def _timed(
    function: Callable[[], Tensor], backend: Backend, device: Device, repeats: int
) -> tuple[Tensor, float]:
    best = math.inf
    for _ in range(repeats):
        backend.synchronize(device)
        start = time.perf_counter()
        result = function()
        backend.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return result, best
