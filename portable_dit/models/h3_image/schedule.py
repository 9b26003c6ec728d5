"""The noise levels of the distilled model, and the times that its rows are fed."""

from __future__ import annotations

from portable_dit.errors import RequestError, WeightsError
from portable_dit.models.h3_image.config import SchedulerConfig
from portable_dit.models.spec import Schedule
from portable_dit.sampling import shift_sigmas, times_of, uniform_sigmas


def make_schedule(config: SchedulerConfig, steps: int, *, heads: int) -> Schedule:
    """The shifted grid, from noise to clean.

    heads: output heads of single steps; 0 = an undistilled model, which takes any number of steps. Raises
    RequestError for a number of steps that the heads were not trained for: head k belongs to noise level k.
    """
    if heads and steps != heads:
        raise RequestError(
            f"steps = {steps}: this model is distilled for exactly {heads}, one output head for each. "
            f"Use {heads}, or leave it out."
        )
    base = config.base_schedule or uniform_sigmas(steps)
    if len(base) != steps + 1:
        raise WeightsError(
            f"base_schedule has {len(base)} noise levels for {steps} steps: there must be {steps + 1}. "
            "Restore scheduler/scheduler_config.json from the checkpoint."
        )
    sigmas = shift_sigmas(base, config.shift)
    return Schedule(sigmas=sigmas, times=times_of(sigmas))


def reference_time(config: SchedulerConfig, time: float) -> float:
    """The time that reference rows are fed while the target is at `time`."""
    return max(time, config.condition_time)


def all_times(config: SchedulerConfig, schedule: Schedule) -> tuple[float, ...]:
    """Every distinct time of a schedule, the target's and the references', ascending."""
    return tuple(sorted({*schedule.times, *(reference_time(config, time) for time in schedule.times)}))
