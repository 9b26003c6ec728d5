"""The six noise levels."""

from __future__ import annotations

import pytest

from portable_dit.errors import RequestError, WeightsError
from portable_dit.models.h3_image.config import SchedulerConfig
from portable_dit.models.h3_image.schedule import all_times, make_schedule

# Computed with an independent implementation of the family's scheduler.
PUBLISHED = {
    12.0: (1.0, 0.9836066, 0.96, 0.9230769, 0.8571428, 0.7058823, 0.0),
    3.0: (1, 0.9375001, 0.8571428, 0.75, 0.6, 0.375, 0),
    1.0: (1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0),
}


@pytest.mark.parametrize("shift", PUBLISHED)
def test_the_grid_is_the_published_one(shift: float) -> None:
    schedule = make_schedule(SchedulerConfig(shift=shift), 6, heads=6)
    assert schedule.steps == 6
    assert schedule.sigmas == pytest.approx(PUBLISHED[shift], abs=1e-7)
    assert schedule.times == pytest.approx([1 - sigma for sigma in PUBLISHED[shift][:-1]], abs=2e-7)


@pytest.mark.parametrize("steps", [1, 5, 7, 50])
def test_other_step_counts_than_heads_are_refused(steps: int) -> None:
    with pytest.raises(RequestError, match=f"steps = {steps}: .* exactly 6"):
        make_schedule(SchedulerConfig(), steps, heads=6)


def test_an_undistilled_model_takes_any_number_of_steps() -> None:
    assert make_schedule(SchedulerConfig(), 20, heads=0).steps == 20


def test_a_checkpoint_may_bring_its_own_grid() -> None:
    base = (1.0, 0.5, 0.25, 0.0)
    assert make_schedule(SchedulerConfig(shift=1.0, base_schedule=base), 3, heads=3).sigmas == base
    with pytest.raises(WeightsError, match="base_schedule has 4 noise levels for 6 steps"):
        make_schedule(SchedulerConfig(base_schedule=base), 6, heads=6)


def test_references_add_one_time_to_the_six() -> None:
    schedule = make_schedule(SchedulerConfig(), 6, heads=6)
    assert all_times(SchedulerConfig(), schedule) == (*schedule.times, 0.999)
