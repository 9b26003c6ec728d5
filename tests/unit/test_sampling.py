"""Noise, noise levels and the denoise loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from portable_dit.models.spec import Schedule
from portable_dit.sampling import denoise, draw_noise, euler_step, shift_sigmas, times_of, uniform_sigmas

SIGMAS = shift_sigmas(uniform_sigmas(6), 12.0)
SCHEDULE = Schedule(sigmas=SIGMAS, times=times_of(SIGMAS))


class TowardsPicture:
    """A denoiser that knows the picture, and so always points from where it is straight at it."""

    def __init__(self, picture: Tensor) -> None:
        self.picture = picture
        self.steps: list[int] = []
        self.blocks = (lambda hidden, factor: hidden * factor,)

    def embed(self, latents: Tensor, step: int) -> tuple[Tensor, tuple[float]]:
        self.latents = latents
        return torch.ones_like(latents), (1.0,)

    def head(self, hidden: Tensor, step: int) -> Tensor:
        self.steps.append(step)
        return hidden * (self.picture - self.latents) / SCHEDULE.sigmas[step]


def test_the_same_seed_draws_the_same_noise_whatever_the_global_generator_did() -> None:
    first = draw_noise((4, 8, 8), 7)
    torch.manual_seed(99)
    assert torch.equal(draw_noise((4, 8, 8), 7), first)
    assert not torch.equal(draw_noise((4, 8, 8), 8), first)
    assert first.dtype == torch.float32
    assert first.device.type == "cpu"


def test_drawing_noise_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    draw_noise((4, 8, 8), 7)
    assert torch.equal(torch.rand(3), expected)


def test_a_shift_moves_levels_towards_noise_and_keeps_both_ends() -> None:
    plain = uniform_sigmas(6)
    shifted = shift_sigmas(plain, 3.0)
    assert shifted[0] == 1.0
    assert shifted[-1] == 0.0
    assert all(moved > level for moved, level in zip(shifted[1:-1], plain[1:-1], strict=True))
    assert shift_sigmas(plain, 1.0) == pytest.approx(plain)


@pytest.mark.parametrize("shift", [0.0, -1.0])
def test_a_shift_that_is_not_positive_is_refused(shift: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        shift_sigmas(uniform_sigmas(6), shift)


def test_a_velocity_at_the_picture_leads_to_the_picture() -> None:
    picture = draw_noise((1, 4, 8, 8), 1)
    latents = denoise([TowardsPicture(picture)], [draw_noise((1, 4, 8, 8), 0)], SCHEDULE)[0]
    assert torch.allclose(latents, picture, atol=1e-5)


def test_every_step_runs_once_and_in_order_and_is_told() -> None:
    denoiser = TowardsPicture(torch.zeros(1, 4, 8, 8))
    told: list[tuple[int, Tensor]] = []
    result = denoise(
        [denoiser],
        [draw_noise((1, 4, 8, 8), 0)],
        SCHEDULE,
        on_step=lambda step, latents: told.append((step, latents[0])),
    )
    assert denoiser.steps == [0, 1, 2, 3, 4, 5]
    assert [step for step, _ in told] == [1, 2, 3, 4, 5, 6]
    assert torch.equal(told[-1][1], result[0])


def test_the_last_step_lands_on_the_clean_estimate() -> None:
    latents, velocity = draw_noise((1, 4, 2, 2), 0), draw_noise((1, 4, 2, 2), 1)
    out = euler_step(latents, velocity, time=0.5, sigma=0.5, sigma_next=0.0)
    assert torch.equal(out, latents + 0.5 * velocity)


def test_the_noise_handed_in_is_not_changed() -> None:
    noise = draw_noise((1, 4, 8, 8), 0)
    denoise([TowardsPicture(torch.zeros(1, 4, 8, 8))], [noise], SCHEDULE)
    assert torch.equal(noise, draw_noise((1, 4, 8, 8), 0))


def test_a_picture_that_is_not_wanted_any_more_leaves_before_the_next_step_and_the_others_stay() -> None:
    pictures = [draw_noise((1, 4, 8, 8), seed) for seed in (1, 2)]
    left, stays = (TowardsPicture(picture) for picture in pictures)
    noises = [draw_noise((1, 4, 8, 8), seed) for seed in (3, 4)]
    latents = denoise(
        [left, stays], noises, SCHEDULE, leaves=lambda place: place == 0 and len(left.steps) == 2
    )
    assert (left.steps, stays.steps) == ([0, 1], [0, 1, 2, 3, 4, 5])
    assert list(latents) == [1]
    assert torch.equal(latents[1], denoise([TowardsPicture(pictures[1])], noises[1:], SCHEDULE)[0])


def test_when_nobody_is_left_no_step_is_made() -> None:
    denoiser = TowardsPicture(torch.zeros(1, 4, 8, 8))
    assert denoise([denoiser], [draw_noise((1, 4, 8, 8), 0)], SCHEDULE, leaves=lambda place: True) == {}
    assert denoiser.steps == []
