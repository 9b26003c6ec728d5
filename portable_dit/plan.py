"""Plan: what a recipe means for one model on one machine, decided before a byte is loaded.

    plan = make_plan(recipe, spec, capabilities, backend.kernel_lists())

Pure and torch-free, so plans can be made for machines that are elsewhere. A wish is met, refused (all
refusals in one RecipeError), or changed with a note; `strict` refuses what would be changed. A plan that
does not fit the memory is still a plan: `fits` says so and `verdict` names a way out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from portable_dit.capabilities import Capabilities, KernelLists
from portable_dit.errors import RecipeError
from portable_dit.fitting import (
    as_much_at_once_as_fits,
    default_workload,
    keep_what_fits,
    largest_workload,
    verdict,
)
from portable_dit.footprint import GRAPH_SHARE, Footprint, Offload, measure_footprint
from portable_dit.kernel_choice import PLAIN, Choices, Refusal, choose_kernels
from portable_dit.layout import Layout, layout_problems, split_problems
from portable_dit.models.spec import (
    COMPONENTS,
    DEVICE_TILE_BATCH,
    TILE_BATCH,
    ModelSpec,
    Numbers,
    Workload,
    input_spans,
)
from portable_dit.recipe import Recipe
from portable_dit.recipe_rules import (
    Findings,
    Note,
    check_batch,
    check_device,
    check_keep,
    check_lora,
    check_offload,
    check_sampling,
    check_workload,
    choose_dtypes,
    choose_executor,
    choose_graphs,
    choose_tiling,
    layout_of,
    memory_limit,
)
from portable_dit.traffic import bytes_sent_in_a_step

GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """The decisions. Mappings are by component: text_encoder, dit, vae.

    dtype: activation type. formats: format of the quantised linears, None where there are none. only: globs
    of the layers that may be quantised; keep: those of them that stay. graphs: whether calls of the DiT and
    the VAE are captured. refusals: every kernel that does not serve, and why. bytes: weights, activations,
    stages, peak, host. traffic: bytes that a rank sends in one denoise step, by kind of exchange. values,
    provenance: every key of the recipe and where its value came from.
    """

    model: str
    backend: str
    device: str
    digest: str
    dtype: Mapping[str, str]
    formats: Mapping[str, str | None]
    only: Mapping[str, tuple[str, ...]]
    keep: tuple[str, ...]
    kernels: Mapping[str, Mapping[str, str]]
    graphs: Mapping[str, bool]
    offload: Offload
    layout: Layout
    executor: str
    steps: int
    workload: Workload
    notes: tuple[Note, ...]
    refusals: tuple[Refusal, ...]
    bytes: Footprint
    traffic: Mapping[str, int]
    verdict: str
    values: Mapping[str, Any]
    provenance: Mapping[str, str]

    @property
    def fits(self) -> bool:
        return self.bytes.fits

    def choices(self, component: str) -> Mapping[str, str]:
        """Seam op -> kernel id, "plain" for the body in ops.py; "linear:<format>" for quantised linears."""
        return self.kernels[component]

    def as_dict(self) -> dict[str, Any]:
        """The whole plan as JSON-able data."""
        data: dict[str, Any] = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        data["bytes"] |= {"peak_stage": self.bytes.peak_stage, "fits": self.fits}
        values, provenance = data.pop("values"), data.pop("provenance")
        return data | {"recipe": {k: {"value": values[k], "from": provenance[k]} for k in values}}


def make_plan(
    recipe: Recipe,
    spec: ModelSpec,
    capabilities: Capabilities,
    kernels: KernelLists | None,
    workload: Workload | None = None,
    *,
    strict: bool = False,
) -> Plan:
    """The plan for a recipe, or RecipeError with everything that is wrong with it.

    kernels: None when the machine's backend is not installed here; the plan then says so instead of naming
    kernels. workload: None plans for one picture of the model's default size.
    """
    tiles = TILE_BATCH if capabilities.host_shares_memory else DEVICE_TILE_BATCH
    workload = replace(workload or default_workload(spec), batch=recipe.batch, tile_batch=tiles)
    found = Findings(notes=[Note("model", note) for note in spec.notes])
    layout = _layout(recipe, spec, capabilities, found)
    if not choose_tiling(recipe, spec, layout, found):
        workload = replace(workload, tile_batch=0)
    executor = choose_executor(recipe, layout, found)
    check_lora(recipe, found)
    check_sampling(recipe, spec, found)
    dtype = choose_dtypes(recipe, spec, capabilities, found)
    offload = check_offload(recipe, spec, capabilities, found)
    graphs = choose_graphs(recipe, layout, offload, capabilities, found)
    check_workload(workload, spec, found)
    numbers = _numbers(recipe, spec, dtype, found)
    formats = {name: held.format for name, held in numbers.items()}
    found.problems += split_problems(spec, layout, formats)
    check_batch(recipe, spec, formats, found)
    attention = recipe.attention
    choices = choose_kernels(
        spec, capabilities, kernels, workload, numbers=numbers, attention=attention, layout=layout
    )
    found.problems += choices.problems
    found.notes += _kernel_notes(
        choices, numbers, capabilities, wish=attention, installed=kernels is not None
    )
    found.notes += _scale_notes(choices, numbers, layout)
    _refuse_problems(recipe, capabilities, found, strict=strict)
    measure = _measure(
        recipe,
        spec,
        capabilities,
        numbers=numbers,
        layout=layout,
        scores=partial(_scores, spec, choices, dtype),
        graphs=graphs,
    )
    offload, workload, size = _fitted(recipe, spec, workload, offload, graphs, measure, found)
    return Plan(
        model=spec.id,
        backend=capabilities.device.backend,
        device=capabilities.device.name,
        digest=recipe.digest,
        dtype=dtype,
        formats=formats,
        only=_patterns(spec),
        keep=numbers["dit"].keep,
        kernels=choices.chosen,
        graphs=graphs,
        offload=offload,
        layout=layout,
        executor=executor,
        steps=recipe.sampling.steps or next(iter(spec.steps), spec.default_steps),
        workload=workload,
        notes=tuple(found.notes),
        refusals=tuple(choices.refusals),
        bytes=size,
        traffic=bytes_sent_in_a_step(
            spec,
            workload,
            layout,
            numbers["dit"],
            branches=branches(recipe, spec),
            quantizing=choices.quantizing["dit"],
        ),
        verdict=verdict(
            size,
            partial(measure, workload),
            offload,
            eight_bits=_eight_bits(spec, capabilities, formats),
            captured=[name for name in ("dit", "vae") if getattr(recipe.graphs, name) is True],
        ),
        values=recipe.values(),
        provenance=recipe.provenance,
    )


def _fitted(
    recipe: Recipe,
    spec: ModelSpec,
    workload: Workload,
    offload: Offload,
    graphs: Mapping[str, bool],
    measure: Callable[[Workload, Offload], Footprint],
    found: Findings,
) -> tuple[Offload, Workload, Footprint]:
    """What stays on the device, what is taken at once, and the footprint with what is left for graphs."""
    counted = offload.dit == "layerwise" and recipe.offload.resident_blocks is None
    if counted:
        offload = keep_what_fits(spec, measure, offload, vae_graphs=graphs["vae"])
    workload, size = as_much_at_once_as_fits(workload, lambda w: measure(w, offload), found)
    if counted and size.fits:
        room = measure(largest_workload(spec), offload).fits_device
        why = "as many as leave room for the largest request" if room else "even so the largest would not fit"
        found.note(
            "resident_blocks",
            f"{offload.resident_blocks} of the DiT's {spec.num_blocks} blocks stay on the device: {why}. "
            "offload.resident_blocks says another number",
        )
    if any(graphs.values()) and not size.graphs:
        size = replace(size, graphs=min(size.left, int(GRAPH_SHARE * size.device_limit)))
    return offload, workload, size


def _measure(
    recipe: Recipe,
    spec: ModelSpec,
    capabilities: Capabilities,
    *,
    numbers: Mapping[str, Numbers],
    layout: Layout,
    scores: Callable[[Workload], Mapping[str, int]],
    graphs: Mapping[str, bool],
) -> Callable[..., Footprint]:
    """`measure_footprint` with what is decided, of (workload, where weights rest, other formats if any)."""
    for_graphs = round((recipe.graphs.memory_gib or 0) * GIB) if any(graphs.values()) else 0
    return lambda workload, offload, formats=MappingProxyType({}): measure_footprint(
        spec,
        capabilities,
        workload,
        numbers={**numbers, **{n: replace(numbers[n], format=format) for n, format in formats.items()}},
        offload=offload,
        layout=layout,
        device_limit=memory_limit(recipe, capabilities),
        extra_activations=scores(workload),
        graphs=for_graphs,
    )


def _eight_bits(
    spec: ModelSpec, capabilities: Capabilities, formats: Mapping[str, str | None]
) -> dict[str, str]:
    """A format of 8 bits for each component that has layers for one and none yet."""
    likely = next((name for name in ("fp8_row", "int8_row") if capabilities.multiplies(name)), "fp8_row")
    return {name: likely for name, globs in _patterns(spec).items() if globs and formats[name] is None}


def _layout(recipe: Recipe, spec: ModelSpec, capabilities: Capabilities, found: Findings) -> Layout:
    layout = layout_of(recipe)
    check_device(recipe, capabilities, layout, found)
    found.problems += layout_problems(layout, spec, devices=recipe.device.count)
    return layout


def _numbers(
    recipe: Recipe, spec: ModelSpec, dtype: Mapping[str, str], found: Findings
) -> dict[str, Numbers]:
    wish = recipe.quantization
    if wish.keep is not None:
        check_keep(wish.keep, spec, found)
    keep = spec.keep if wish.keep is None else wish.keep
    return {name: Numbers(dtype[name], getattr(wish, name), keep) for name in COMPONENTS}


def branches(recipe: Recipe, spec: ModelSpec) -> int:
    """Guidance branches of a request that does not say a scale of its own."""
    scale = recipe.sampling.guidance_scale
    return spec.branches(spec.default_guidance if scale is None else scale)


def _patterns(spec: ModelSpec) -> Mapping[str, tuple[str, ...]]:
    """Globs of the layers that may be quantised, by component."""
    return {name: tuple(g.pattern for g in spec.linears if g.component == name) for name in COMPONENTS}


def _kernel_notes(
    choices: Choices,
    numbers: Mapping[str, Numbers],
    capabilities: Capabilities,
    *,
    wish: str,
    installed: bool,
) -> list[Note]:
    backend, device = capabilities.device.backend, capabilities.device.name
    if not installed:
        text = f"backend {backend} is not installed here, so its kernels cannot be named"
        text += "" if wish == "auto" else f", nor can it be said whether attention={wish} is one"
        return [Note("kernels_unknown", text)]
    notes = []
    for name, held in numbers.items():
        if choices.chosen[name].get("attention") == PLAIN:
            text = f"attention of the {name} runs in plain torch, which holds all scores at once"
            notes.append(Note("plain_attention", text))
        weight_only = held.format is not None and held.format.endswith("_weight_only")
        if held.format and not weight_only and not capabilities.multiplies(held.format):
            text = (
                f"quantization.{name}={held.format}: {device} has no matrix unit for it, "
                "so it saves memory but no time"
            )
            notes.append(Note("not_native", text, changed=True))
    return notes


def _scale_notes(choices: Choices, numbers: Mapping[str, Numbers], layout: Layout) -> list[Note]:
    """Inputs whose one scale belongs to rows that devices hold apart and scale apart."""
    notes = []
    for name, key, degree in (("dit", "guidance", layout.guidance), ("vae", "vae_tiles", layout.vae_tiles)):
        format = numbers[name].format
        if degree > 1 and format and choices.quantizing[name] and input_spans(format)[0]:
            text = (
                f"quantization.{name}={format}: an input has one scale for all its rows, and each device of "
                f"layout.{key}={degree} has one for its own, so the picture is that of one device up to the "
                "format's rounding; fp8_row has a scale for each row"
            )
            notes.append(Note("scales_apart", text))
    return notes


def _scores(
    spec: ModelSpec, choices: Choices, dtype: Mapping[str, str], workload: Workload
) -> dict[str, int]:
    """Bytes of the attention scores, twice in float32, where the plain body holds them all."""
    extra: dict[str, int] = {}
    for name in COMPONENTS:
        if choices.chosen[name].get("attention") == PLAIN:
            requests = spec.attention_requests(workload, dtype[name])
            extra[name] = max(8 * r.num_heads * r.rows**2 for owner, r in requests if owner == name)
    return extra


def _refuse_problems(recipe: Recipe, capabilities: Capabilities, found: Findings, *, strict: bool) -> None:
    """Raises RecipeError when there are problems, or with `strict` changed wishes."""
    problems = list(found.problems)
    if strict:
        problems += [f"strict: {note.text}" for note in found.notes if note.changed]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        title = f"recipe for {recipe.model} on {capabilities.device.name}: {count}"
        raise RecipeError("\n".join([title, *(f"  {problem}" for problem in problems)]))


def _plain(value: Any) -> Any:
    """Frozen data as JSON-able data."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return value
