"""End to end: the built-in model draws the picture that it draws in float32 on the host, within a bound.

The bound is twice the difference that the plain bodies make on the host at the same precision and number
format. What changes no numbers, such as offload and graphs, must change no pixel. Then the soak: the same
request again and again gives the same pixels and takes no more memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from portable_dit import DEFAULT_RECIPE
from portable_dit.backend import Backend
from portable_dit.capabilities import Capabilities, Device
from portable_dit.conformance.outcome import Outcome, Promises
from portable_dit.engine import Engine
from portable_dit.errors import UserError
from portable_dit.plugins import BUILT_IN
from portable_dit.request import Request
from portable_dit.setup import Setup, set_up

Pixels = NDArray[np.uint8]
PROMPT = "a red apple on a sky blue background, 3d style"
PRECISIONS = ("float32", "bfloat16")  # the built-in model does not keep its pictures in float16
SIZE = (256, 256)
SEED = 7
SOAK = 50  # requests of a soak
ONE_LEVEL = 1.0  # of 255, root mean square: what the last rounding to bytes can do
GROWTH = 24 << 20  # bytes that a soak may gain; caches fill up


def check_pictures(backend: Backend, device: Device, capabilities: Capabilities) -> list[Outcome]:
    """A picture for each dtype, native format, way of offloading, and with graphs."""
    _draw.cache_clear()  # the backend of that name may be another one than before
    told = _Pictures(backend)
    dtypes = [name for name in PRECISIONS if name in capabilities.dtypes]
    for name in dtypes:
        told.compare(f"precision_{name}", name, None)
    best = "bfloat16" if "bfloat16" in dtypes else "float32"
    for format in sorted(capabilities.native_formats):
        told.compare(f"quantized_{format}", best, format)
    if capabilities.host_shares_memory:
        told.promises.not_claimed("offload", "host_shares_memory: there is nothing to offload from")
    else:
        told.unchanged("offload_component", best, {f"offload.{c}": "component" for c in _COMPONENTS})
        told.unchanged("offload_layerwise", best, {"offload.dit": "layerwise", "offload.resident_blocks": 1})
    if capabilities.graphs.supported:
        told.unchanged("graphs", best, {"graphs.dit": True, "graphs.vae": True})
    else:
        told.promises.not_claimed("graphs", "graphs.supported is false")
    return told.promises.outcomes


def check_soak(backend: Backend, device: Device, *, requests: int = SOAK) -> list[Outcome]:
    """The same request again and again on one engine."""
    told = Promises("soak", backend.id)
    told.check("same_pixels_no_growth", lambda: _soak_trouble(backend, device, requests))
    return told.outcomes


_COMPONENTS = ("text_encoder", "dit", "vae")


class _Pictures:
    """Draws on the backend, and compares with what the host draws."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend.id
        self.promises = Promises("end_to_end", backend.id)

    def compare(self, case: str, dtype: str, format: str | None) -> None:
        """Against float32 on the host; noted with the numbers."""
        promises = self.promises
        promises.check(case, lambda: self._difference_trouble(dtype, format), dtype=dtype)
        if promises.outcomes[-1].status == "pass":
            error, bound = self._difference(dtype, format)
            promises.outcomes[-1] = replace(promises.outcomes[-1], error=error, tolerance=bound)

    def unchanged(self, case: str, dtype: str, wish: Mapping[str, Any]) -> None:
        """Against the same backend without the wish, pixel for pixel."""

        def trouble() -> str | None:
            plain, _ = _draw(self._backend, dtype, None, ())
            other, changes = _draw(self._backend, dtype, None, tuple(wish.items()))
            if changes:
                return f"was met in another way: {'; '.join(changes)}"
            count = int((plain != other).any(axis=-1).sum())
            return f"{count} pixels differ from the picture without it" if count else None

        self.promises.check(case, trouble, dtype=dtype)

    def _difference(self, dtype: str, format: str | None) -> tuple[float, float]:
        """(difference of the backend's picture, bound), root mean square in levels of 255."""
        reference = _host_picture("float32", None)
        own = _rms(_draw(self._backend, dtype, format, ())[0], reference)
        plain = _rms(_host_picture(dtype, format), reference)
        return own, 2 * plain + ONE_LEVEL

    def _difference_trouble(self, dtype: str, format: str | None) -> str | None:
        own, bound = self._difference(dtype, format)
        return None if own <= bound else f"{own:.2f} levels from float32 on the host, above {bound:.2f}"


def _rms(a: Pixels, b: Pixels) -> float:
    return float(np.sqrt(np.mean((a.astype(float) - b.astype(float)) ** 2)))


@lru_cache(maxsize=64)
def _draw(
    backend: str, dtype: str, format: str | None, wish: tuple[tuple[str, Any], ...]
) -> tuple[Pixels, tuple[str, ...]]:
    """The picture on that backend, and which wishes were met in another way."""
    return _picture(_setup(backend, dtype, format, dict(wish)))


@lru_cache(maxsize=16)
def _host_picture(dtype: str, format: str | None) -> Pixels:
    """The picture that the plain bodies draw on the host. Where the host refuses a dtype, in float32."""
    try:
        setup = _setup(BUILT_IN, dtype, format, {})
    except UserError:
        setup = _setup(BUILT_IN, "float32", format, {})
    return _picture(_with_plain_kernels(setup))[0]


def _setup(backend: str, dtype: str, format: str | None, wish: Mapping[str, Any]) -> Setup:
    overrides: dict[str, Any] = {
        "device.backend": backend,
        "device.name": None,
        "precision": dtype,
        "prompt_cache_mib": 0,
        "graphs.dit": False,
        "graphs.vae": False,
    }
    if format is not None:
        overrides["quantization.dit"] = format
    return set_up(DEFAULT_RECIPE, overrides | dict(wish))


def _with_plain_kernels(setup: Setup) -> Setup:
    """The setup with the bodies of ops.py in every seam, and formats computed as their matrix units would."""
    kernels = {
        component: {op: "emulated" if op.startswith("linear:") else "plain" for op in choices}
        for component, choices in setup.plan.kernels.items()
    }
    return replace(setup, plan=replace(setup.plan, kernels=kernels))


def _picture(setup: Setup) -> tuple[Pixels, tuple[str, ...]]:
    with Engine.load(setup) as engine:
        result = engine.generate(Request(PROMPT, size=SIZE, seed=SEED))
        return result.images[0].pixels, result.changes


def _soak_trouble(backend: Backend, device: Device, requests: int) -> str | None:
    dtypes = backend.capabilities(device).dtypes
    setup = _setup(backend.id, "bfloat16" if "bfloat16" in dtypes else "float32", None, {})
    request = Request(PROMPT, size=SIZE, seed=SEED)
    with Engine.load(setup) as engine:
        first = engine.generate(request).images[0].pixels
        engine.generate(request)
        setup.backend.peak_bytes(device, reset=True)
        engine.generate(request)
        before = setup.backend.peak_bytes(device, reset=True)
        for number in range(requests):
            if not np.array_equal(engine.generate(request).images[0].pixels, first):
                return f"request number {number + 4} draws another picture than the first"
        engine.generate(request)
        after = setup.backend.peak_bytes(device)
    if before is None or after is None:
        return None
    grown = after - before
    return f"{requests} requests took {grown} bytes more" if grown > GROWTH else None
