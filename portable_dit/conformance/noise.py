"""RNG: noise is drawn in float32 on the host and moved, so a seed gives the same picture on any device."""

from __future__ import annotations

import torch

from portable_dit.backend import Backend
from portable_dit.capabilities import Capabilities, Device
from portable_dit.conformance.outcome import Outcome, Promises

SHAPE = (1, 544, 384)


def check_noise(backend: Backend, device: Device, capabilities: Capabilities) -> list[Outcome]:
    """Moving and casting change no bit, and nobody else's random numbers are spent."""
    told = Promises("rng", backend.id)
    told.check("moved_bit_for_bit", lambda: _moved_trouble(device))
    for name in sorted(capabilities.dtypes - {"float32"}):
        told.check("cast_as_on_the_host", lambda name=name: _cast_trouble(device, name), dtype=name)  # type: ignore[misc]
    told.check("host_generator_is_left_alone", lambda: _spent_trouble(backend, device))
    return told.outcomes


def _noise(seed: int = 0) -> torch.Tensor:
    """float32 on the host, with the values at which rounding goes wrong: ties, subnormals, the largest."""
    noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    ties = torch.arange(1, 385) * 2.0**-8 + 1  # halfway between neighbours of bfloat16, and on them
    noise[0, 0] = ties
    noise[0, 1] = ties * 2.0**-12
    return noise


def _moved_trouble(device: Device) -> str | None:
    noise = _noise()
    back = noise.to(device.torch_device).cpu()
    return None if torch.equal(back, noise) else "float32 noise is not the same after a trip to the device"


def _cast_trouble(device: Device, dtype: str) -> str | None:
    noise, target = _noise(), getattr(torch, dtype)
    there = noise.to(device.torch_device).to(target)
    if not torch.equal(there.cpu(), noise.to(target)):
        return f"float32 rounds to {dtype} otherwise than on the host"
    return None if torch.equal(there.float().cpu(), noise.to(target).float()) else f"{dtype} widens otherwise"


def _spent_trouble(backend: Backend, device: Device) -> str | None:
    before = torch.get_rng_state()
    lane = backend.lane(device)
    lane.copy(torch.empty(64, dtype=torch.uint8, device=device.torch_device), backend.host_buffer(64))
    backend.synchronize(device)
    backend.capabilities(device)
    if torch.equal(before, torch.get_rng_state()):
        return None
    return "using the device draws from the host's default generator"
