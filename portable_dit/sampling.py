"""Noise, noise levels and the denoise loop.

Sigma is the noise level, 1 -> 0; time is 1 - sigma, and 1 is clean. Everything here is float32: these few
numbers decide the picture, and they must be the same on every device.

Letters: B batch, C latent channels, h w latent cells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from portable_dit.models.spec import Denoiser, Schedule

BlockRunner = Callable[[Sequence[Callable[..., Tensor]], Tensor, tuple[Any, ...]], Tensor]
Embedded = tuple[Tensor, tuple[Any, ...]]  # what `Denoiser.embed` gives
PicturesRunner = Callable[[Sequence["Denoiser"], Sequence[Embedded]], list[Tensor]]


def draw_noise(shape: Sequence[int], seed: int) -> Tensor:
    """Standard normal noise, float32 on the CPU, from a generator of its own.

    So no device, layout or batch mate changes it.
    """
    return torch.randn(tuple(shape), generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32)


def uniform_sigmas(steps: int) -> tuple[float, ...]:
    """steps + 1 equally spaced float32 noise levels, 1 -> 0."""
    return tuple(torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float32).tolist())


def shift_sigmas(sigmas: Sequence[float], shift: float) -> tuple[float, ...]:
    """Sigmas moved towards the noisy end, where the picture's layout is decided; float32 arithmetic.

    sigmas: 1 -> 0. shift: > 0, 1 leaves them as they are. Raises ValueError when shift <= 0.
    Source: SD3 (arXiv 2403.03206), resolution-dependent shift.
    """
    if shift <= 0:
        raise ValueError(f"shift = {shift}: must be positive; 1 leaves the noise levels as they are.")
    levels = torch.tensor(sigmas, dtype=torch.float32)
    return tuple((shift * levels / (1 + (shift - 1) * levels)).tolist())


def times_of(sigmas: Sequence[float]) -> tuple[float, ...]:
    """The time of every step, 1 - sigma in float32; the last sigma has no step."""
    return tuple((1.0 - torch.tensor(sigmas[:-1], dtype=torch.float32)).tolist())


def euler_step(latents: Tensor, velocity: Tensor, *, time: float, sigma: float, sigma_next: float) -> Tensor:
    """The latents at the next noise level, for a velocity that points towards the data; all float32.

    The noise left is taken from the time for the clean estimate and from the sigmas for the blend. The two
    differ in the last bits below sigma 0.5; the family's schedulers do it this way, and so the pictures match
    to the bit.
    """
    left = _float32(1.0) - _float32(time)
    clean = latents + left.item() * velocity
    ratio = _float32(sigma_next) / _float32(sigma)
    return ratio.item() * latents + (1.0 - ratio).item() * clean


def denoise(
    denoisers: Sequence[Denoiser],
    noises: Sequence[Tensor],
    schedule: Schedule,
    *,
    on_step: Callable[[int, Mapping[int, Tensor]], None] | None = None,
    leaves: Callable[[int], bool] | None = None,
    run: PicturesRunner | None = None,
    combine: Callable[[Tensor], Tensor] | None = None,
) -> dict[int, Tensor]:
    """Noise float32 [1, C, h, w] of each picture -> its clean latents, by its place among them.

    on_step: told the number of steps done and the latents after each, by place. leaves: asked before each
    step, of each place; a picture of which it says yes is not drawn further and not in the result. run: how
    the blocks are called; None = `run_each`. combine: how the velocities of a picture's guidance branches
    [branches, C, h, w] become one; None = there is one branch.
    """
    latents = dict(enumerate(noises))
    for step, time in enumerate(schedule.times):
        latents = {place: x for place, x in latents.items() if leaves is None or not leaves(place)}
        if not latents:
            break
        velocities = predict(
            [denoisers[place] for place in latents], list(latents.values()), step, run or run_each
        )
        for place, velocity in zip(list(latents), velocities, strict=True):
            latents[place] = euler_step(
                latents[place],
                velocity if combine is None else combine(velocity),
                time=time,
                sigma=schedule.sigmas[step],
                sigma_next=schedule.sigmas[step + 1],
            )
        if on_step is not None:
            on_step(step + 1, latents)
    return latents


def guided(velocities: Tensor, scale: float, rescale: float = 0.0) -> Tensor:
    """Classifier-free guidance: float32 velocities of both branches, conditional first, -> [1, C, h, w].

    velocities: [2, C, h, w], or [1, C, h, w] where one branch was evaluated, which is then the result.
    rescale: 0 to 1, how far the result is brought back to the spread of the conditional velocity, which large
    scales widen. Sources: Ho & Salimans 2022 (arXiv 2207.12598), in the form that extrapolates from the
    unconditional one; Lin et al. 2023 (arXiv 2305.08891), section 3.4.
    """
    if velocities.shape[0] == 1:
        return velocities
    conditional, unconditional = velocities.chunk(2)
    out = unconditional + scale * (conditional - unconditional)
    if rescale:
        out = out * (rescale * conditional.std() / out.std() + (1.0 - rescale))
    return out


def run_blocks(blocks: Sequence[Callable[..., Tensor]], hidden: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    """Hidden rows [B, S, C] through all blocks, each with the same further arguments."""
    for block in blocks:
        hidden = block(hidden, *arguments)
    return hidden


def run_each(
    denoisers: Sequence[Denoiser], embedded: Sequence[Embedded], run: BlockRunner = run_blocks
) -> list[Tensor]:
    """Hidden rows [B, S, C] of each picture through the blocks, one picture after the other."""
    return [run(denoiser.blocks, *rows) for denoiser, rows in zip(denoisers, embedded, strict=True)]


def run_together(
    denoisers: Sequence[Denoiser], embedded: Sequence[Embedded], run: BlockRunner = run_blocks
) -> list[Tensor]:
    """Hidden rows [B, S, C] of each picture through the blocks, side by side in one batch.

    Each gets memory of its own again, as it has alone, since libraries choose kernels by where numbers lie.
    """
    lengths = [hidden.shape[0] for hidden, _ in embedded]
    arguments = denoisers[0].join([own for _, own in embedded])
    out = run(denoisers[0].blocks, torch.cat([hidden for hidden, _ in embedded]), arguments)
    return [part.clone() for part in torch.split(out, lengths)]


def predict(
    denoisers: Sequence[Denoiser],
    latents: Sequence[Tensor],
    step: int,
    run: PicturesRunner = run_each,
) -> list[Tensor]:
    """One evaluation of each picture: its velocity in the shape of its latents, float32.

    All but the blocks is done for each alone.
    """
    embedded = [denoiser.embed(x, step) for denoiser, x in zip(denoisers, latents, strict=True)]
    hidden = run(denoisers, embedded)
    return [denoiser.head(rows, step) for denoiser, rows in zip(denoisers, hidden, strict=True)]


def _float32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)
