"""Fitting: what of a plan gives way to the memory that there is, and the sentence that says how it fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from portable_dit.footprint import Footprint, Offload
from portable_dit.models.spec import COMPONENTS, ModelSpec, Workload
from portable_dit.recipe_rules import Findings

GIB = 2**30
MOVING = ("component", "layerwise")
LONG_PROMPT = 8  # times the tokens that a plan counts with
# What to try when a plan does not fit, one on top of the other: what costs the least time comes first.
SAVINGS = (
    ("text_encoder", "component"),
    ("vae", "component"),
    ("dit", "component"),
    ("dit", "layerwise"),
    ("text_encoder", "layerwise"),
)


def default_workload(spec: ModelSpec) -> Workload:
    """One picture of the model's default size, without references."""
    width, height = spec.sizes.default
    return Workload(width, height, spec.prompt_tokens)


def largest_workload(spec: ModelSpec) -> Workload:
    """The hungriest request: one picture of the most pixels, a long prompt, and all references there may be.

    One more of these, since the rule that sizes them gives some shapes up to 3 % more rows than others.
    """
    canvas, most = spec.sizes.largest, spec.max_references
    reference = spec.reference_size(*canvas, canvas=canvas)
    tokens = min(LONG_PROMPT * spec.prompt_tokens, spec.max_prompt_characters)
    return Workload(*canvas, tokens, (reference,) * (most + 1 if most else 0))


def keep_what_fits(
    spec: ModelSpec,
    measure: Callable[[Workload, Offload], Footprint],
    offload: Offload,
    *,
    vae_graphs: bool = False,
) -> Offload:
    """Layerwise offload with as many DiT blocks on the device as leave room for the largest request.

    So none of them is ever the reason that a request does not fit. vae_graphs: whether captured tiles shall
    have room to compute in.
    """
    workload = largest_workload(spec)

    def too_many(count: int) -> bool:
        size = measure(workload, replace(offload, resident_blocks=count))
        return not size.fits_device or (vae_graphs and size.left < size.components["vae"].activations)

    count = bisect_left(range(spec.num_blocks), True, key=too_many) - 1
    return replace(offload, resident_blocks=max(count, 0))


def as_much_at_once_as_fits(
    workload: Workload, measure: Callable[[Workload], Footprint], found: Findings
) -> tuple[Workload, Footprint]:
    """The workload with as many pictures and tiles at once as fit beside the rest, and its footprint.

    What it gave up is noted where it fits for that; where it does not all the same, the verdict says so.
    """
    asked, tiles, size = workload.batch, workload.tile_batch, measure(workload)
    while not size.fits and size.peak_stage == "dit" and workload.batch > 1:
        workload = replace(workload, batch=workload.batch - 1)
        size = measure(workload)
    while not size.fits_device and size.peak_stage == "vae" and workload.tile_batch > 1:
        workload = replace(workload, tile_batch=workload.tile_batch // 2)
        size = measure(workload)
    if size.fits and workload.batch < asked:
        found.note("batch", f"the DiT takes {workload.batch} pictures at once instead of {asked}, to fit")
    if size.fits and workload.tile_batch < tiles:
        found.note("tiles", f"the VAE takes {workload.tile_batch} tiles at once instead of {tiles}, to fit")
    return workload, size


def verdict(
    size: Footprint,
    measure: Callable[[Offload, Mapping[str, str]], Footprint],
    offload: Offload,
    *,
    eight_bits: Mapping[str, str],
    captured: Collection[str],
) -> str:
    """One sentence for people: whether it fits, by how much, and if not, what would.

    measure: of other places of weights, and other formats by component. eight_bits: formats that components
    without one could have. captured: components whose calls shall be captured, so that they may not move.
    """
    where = "memory" if size.shared else "device memory"
    need = f"{_gib(size.peak)} of {_gib(size.device_limit)} {where} at the peak ({size.peak_stage})"
    if size.in_use:
        need += f", {_gib(size.in_use)} beside it being in use already"
    if size.fits:
        return f"fits: {need}"
    if size.graphs:
        need += f", {_gib(size.graphs)} for graphs"
        if 100 * size.left >= GIB and replace(size, graphs=size.left).fits:
            return f"does not fit: {need}. It would with graphs.memory_gib={size.left * 100 // GIB / 100:g}."
    if not size.fits_host:
        need += f", {_gib(size.host)} of {_gib(size.host_limit)} host memory"
    if size.shared and size.host > size.peak:
        need += f" of one process, {_gib(size.host)} in all"
    keys = None if size.shared else _way_out(measure, offload, captured, eight_bits)
    if keys is not None:
        return f"does not fit: {need}. It would with {keys}."
    alone = "" if size.shared else ", nor would it with everything offloaded and in 8 bits"
    return f"does not fit: {need}{alone}. A smaller size or a machine with more memory is needed."


def _way_out(
    measure: Callable[[Offload, Mapping[str, str]], Footprint],
    offload: Offload,
    captured: Collection[str],
    eight_bits: Mapping[str, str],
) -> str | None:
    """The keys with which it would fit, or None; fewer bits only where moving weights is no help."""
    names = tuple(name for name in ("dit", "text_encoder") if name in eight_bits)
    for chosen in dict.fromkeys(((), *((name,) for name in names), names)):
        formats = {name: eight_bits[name] for name in chosen}
        moved = _places_that_fit(measure, offload, formats)
        if moved is not None:
            keys = [f"quantization.{name}={format}" for name, format in formats.items()]
            keys += [f"offload.{name}={place}" for name, place in moved.items()]
            keys += [f"graphs.{name}=auto" for name in captured if moved.get(name) in MOVING]
            return " ".join(keys)
    return None


def _places_that_fit(
    measure: Callable[[Offload, Mapping[str, str]], Footprint], offload: Offload, formats: Mapping[str, str]
) -> dict[str, Any] | None:
    """What of `offload` to change so that it fits, no more than is needed; None where nothing helps."""

    def fits(places: Offload) -> bool:
        return measure(places, formats).fits

    for count in range(offload.resident_blocks, -1, -1):
        if fits(replace(offload, resident_blocks=count)):
            return {} if count == offload.resident_blocks else {"resident_blocks": count}
    changes: dict[str, Any] = {"resident_blocks": 0} if offload.resident_blocks else {}
    order = ("none", *MOVING)
    for name, placement in SAVINGS:
        if order.index(offload.of(name)) < order.index(placement):
            changes[name] = placement
            if fits(replace(offload, **changes)):
                break
    else:
        return None
    for name in [*changes]:
        fewer = {other: place for other, place in changes.items() if other != name}
        if fits(replace(offload, **fewer)):
            changes = fewer
    return {name: changes[name] for name in (*COMPONENTS, "resident_blocks") if name in changes}


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
