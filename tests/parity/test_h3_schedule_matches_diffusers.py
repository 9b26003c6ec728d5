"""Our noise levels and Euler step against diffusers' `MiniMaxH3Scheduler`, to the bit."""

from __future__ import annotations

import pytest
import torch
from diffusers import MiniMaxH3Scheduler

from portable_dit.models.h3_image.config import SchedulerConfig
from portable_dit.models.h3_image.schedule import make_schedule
from portable_dit.sampling import euler_step


@pytest.mark.parametrize("shift", [12.0, 3.0, 1.0])
def test_sigmas_and_times_equal_diffusers_to_the_bit(shift: float) -> None:
    scheduler = MiniMaxH3Scheduler(shift=shift)
    scheduler.set_timesteps(7)  # diffusers counts grid points, we count evaluations
    schedule = make_schedule(SchedulerConfig(shift=shift), 6, heads=6)
    assert list(schedule.sigmas) == scheduler.sigmas.tolist()
    assert list(schedule.times) == scheduler.timesteps.tolist()


@pytest.mark.parametrize("shift", [12.0, 3.0, 1.0])
def test_six_euler_steps_equal_diffusers_to_the_bit(shift: float) -> None:
    scheduler = MiniMaxH3Scheduler(shift=shift)
    scheduler.set_timesteps(7)
    schedule = make_schedule(SchedulerConfig(shift=shift), 6, heads=6)
    generator = torch.Generator().manual_seed(0)
    ours = theirs = torch.randn(1, 24, 8, 8, generator=generator)
    for step, time in enumerate(scheduler.timesteps):
        velocity = torch.randn(ours.shape, generator=generator)
        theirs = scheduler.step(velocity, time, theirs).prev_sample
        ours = euler_step(
            ours,
            velocity,
            time=schedule.times[step],
            sigma=schedule.sigmas[step],
            sigma_next=schedule.sigmas[step + 1],
        )
        assert torch.equal(ours, theirs), f"step {step}"
