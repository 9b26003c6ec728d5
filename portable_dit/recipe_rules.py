"""The rules that a recipe must keep on one machine for one model, and the choices it leaves open.

Each function adds what it finds to `Findings`: problems refuse the recipe, notes go into the plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from portable_dit.capabilities import Capabilities
from portable_dit.errors import near
from portable_dit.footprint import Offload
from portable_dit.layout import Layout
from portable_dit.models.spec import COMPONENTS, ModelSpec, Workload, input_spans, matches
from portable_dit.recipe import Recipe
from portable_dit.request import size_problem

GIB = 2**30
# Codes of the notes on how a plan fits what memory is free just now. No bit of a picture depends on that.
FREE_MEMORY = ("device_memory", "resident_blocks", "batch", "tiles")


@dataclass(frozen=True)
class Note:
    """Something a person should know. changed: a wish is met in another way than it was written."""

    code: str
    text: str
    changed: bool = False


@dataclass
class Findings:
    """What the rules found so far."""

    problems: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def note(self, code: str, text: str, *, changed: bool = False) -> None:
        self.notes.append(Note(code, text, changed))


def layout_of(recipe: Recipe) -> Layout:
    """The recipe's layout, legal or not."""
    return Layout(**recipe.layout.model_dump())


def memory_limit(recipe: Recipe, capabilities: Capabilities) -> int:
    """Bytes of each device to plan with and to hold to: what the recipe says, and no more than is unused."""
    unused, asked = capabilities.unused_bytes, recipe.device.memory_gib
    return min(round(asked * GIB), unused) if asked else unused


def check_device(recipe: Recipe, capabilities: Capabilities, layout: Layout, found: Findings) -> None:
    """The backend is the machine's, and there are enough devices."""
    asked, device = recipe.device, capabilities.device
    if asked.backend not in (None, "auto", device.backend):
        found.problems.append(
            f"device.backend={asked.backend}: {device.name} belongs to backend {device.backend}. "
            f"Say device.backend={device.backend}, or leave it out."
        )
    count = asked.count or layout.world
    if count > capabilities.count and recipe.executor != "ray":
        there = f"{capabilities.count} x {device.name}"
        fewer = f"device.count={layout.world}, which the layout uses"
        if layout.world > capabilities.count:
            fewer = "a layout of no more than that, and its device.count"
        found.problems.append(
            f"device.count={count}: this machine has {there}. Say {fewer}, or executor=ray to use several "
            "machines."
        )
    unused = capabilities.unused_bytes
    has = f"{device.name} has {device.total_bytes / GIB:.2f} GiB"
    if capabilities.used_bytes:
        has += f", {capabilities.used_bytes / GIB:.2f} of them in use already"
    if asked.memory_gib and asked.memory_gib * GIB > unused:
        text = f"device.memory_gib={asked.memory_gib:g}: {has}; {unused / GIB:.2f} are planned with"
        found.note("device_memory", text, changed=True)
    elif capabilities.used_bytes and not asked.memory_gib:
        found.note("device_memory", f"{has}; {unused / GIB:.2f} are planned with")


def check_lora(recipe: Recipe, found: Findings) -> None:
    """Adapters change weights that mean something."""
    if recipe.lora and recipe.weights == "random":
        found.problems.append(
            "lora: weights=random have nothing to change. Leave lora out, or name a checkpoint."
        )
    for words in recipe.lora:
        words = re.sub(r"[/\\]+(:[^/\\]*)?$", r"\1", words)
        name = re.split(r"[/\\]", words)[-1]  # notes go into pictures, which are nobody's place for folders
        found.note("lora", f"lora {name}: added to the DiT's weights while they are loaded")


def choose_executor(recipe: Recipe, layout: Layout, found: Findings) -> str:
    """What starts the processes of the layout."""
    if recipe.executor == "auto":
        return "inline" if layout.world == 1 else "mp"
    if recipe.executor == "inline" and layout.world > 1:
        found.problems.append(
            f"executor=inline: one process drives one device, the layout needs {layout.world}. "
            "Say executor=mp, or auto."
        )
    return recipe.executor


def check_workload(workload: Workload, spec: ModelSpec, found: Findings) -> None:
    problem = size_problem(workload.width, workload.height, spec.sizes)
    found.problems += [problem] if problem else []
    references = len(workload.reference_sizes)
    if references > spec.max_references:
        found.problems.append(
            f"references: {references} were given and {spec.id} takes at most {spec.max_references}."
        )
    if workload.images < 1:
        found.problems.append(f"images={workload.images}: must be at least 1.")


def check_sampling(recipe: Recipe, spec: ModelSpec, found: Findings) -> None:
    steps, guidance = recipe.sampling.steps, recipe.sampling.guidance_scale
    if steps is not None and spec.steps and steps not in spec.steps:
        allowed = " or ".join(str(n) for n in spec.steps)
        found.problems.append(
            f"sampling.steps={steps}: {spec.id} was trained for {allowed} steps. "
            f"Say {allowed}, or leave it out."
        )
    if guidance not in (None, 1.0) and not spec.has_guidance:
        found.problems.append(
            f"sampling.guidance_scale={guidance:g}: {spec.id} is distilled and has no guidance. Leave it out."
        )


def choose_dtypes(
    recipe: Recipe, spec: ModelSpec, capabilities: Capabilities, found: Findings
) -> dict[str, str]:
    """The activation type of each component."""
    asked, device = recipe.precision, capabilities.device.name
    usable = [name for name in spec.dtypes if name in capabilities.dtypes]
    if asked == "auto":
        dtype = "bfloat16" if "bfloat16" in usable else "float32"
        reason = "computes in it" if dtype == "bfloat16" else "does not compute in bfloat16"
        found.note("precision", f"precision auto is {dtype}: {device} {reason}")
    elif asked in usable:
        dtype = asked
    else:
        dtype = "float32"
        owner = spec.id if asked not in spec.dtypes else device
        rule = "does not keep its pictures in" if owner == spec.id else "does not compute in"
        found.problems.append(
            f"precision={asked}: {owner} {rule} {asked}. Say precision=auto, or {' or '.join(usable)}."
        )
    full = [name for name in spec.float32_components if dtype != "float32"]
    if full:
        found.note("precision", f"{', '.join(full)} stays in float32, as its checkpoint is")
    chosen = {name: "float32" if name in spec.float32_components else dtype for name in COMPONENTS}
    for name, wishes in spec.own_dtypes.items() if dtype != "float32" else ():
        chosen[name] = next((wish for wish in wishes if wish in capabilities.dtypes), "float32")
        if chosen[name] != dtype:
            found.note("precision", f"{name} computes in {chosen[name]}, as its checkpoint is meant to")
    return chosen


def check_keep(keep: Sequence[str], spec: ModelSpec, found: Findings) -> None:
    """A glob that matches nothing is a misspelt name, and the layer it meant would be quantised."""
    names = [name for group in spec.linears for name in group.names()]
    known = sorted({group.pattern.split(".")[0] for group in spec.linears})
    for glob in keep:
        if not any(matches(name, (glob,)) for name in names):
            found.problems.append(
                f"quantization.keep: {glob!r} matches no linear layer of {spec.id}.{near(glob, known)}"
            )


def choose_tiling(recipe: Recipe, spec: ModelSpec, layout: Layout, found: Findings) -> bool:
    """Whether the VAE decodes in tiles."""
    asked = recipe.vae_tiling
    if spec.tiling == "always":
        if asked is False:
            found.problems.append(
                f"vae_tiling=false: {spec.id} was trained on tiles and draws worse without. Leave it out."
            )
        return True
    if asked is True:
        text = "vae_tiling: this model was trained on whole pictures, so borders of tiles may show faintly"
        found.note("tiling", text)
    elif layout.vae_tiles > 1:
        found.problems.append(
            f"layout.vae_tiles={layout.vae_tiles}: {spec.id} decodes pictures whole, which is one tile. "
            "Say vae_tiling=true, or layout.vae_tiles=1."
        )
    return asked is True


def check_offload(recipe: Recipe, spec: ModelSpec, capabilities: Capabilities, found: Findings) -> Offload:
    wish = recipe.offload
    resident = wish.resident_blocks or 0
    offload = Offload(wish.dit, wish.text_encoder, wish.vae, resident)
    for name in COMPONENTS:
        if offload.of(name) == "layerwise" and name not in spec.streamed:
            what = {"vae": "VAE", "dit": "DiT"}.get(name, "text encoder")
            found.problems.append(
                f"offload.{name}=layerwise: the {what} has no blocks to bring in turn. Say component."
            )
    if resident and offload.dit != "layerwise":
        found.problems.append(
            f"offload.resident_blocks={resident}: only offload.dit=layerwise has blocks that stay. "
            "Leave it out."
        )
    elif resident >= spec.num_blocks and offload.dit == "layerwise":
        found.problems.append(
            f"offload.resident_blocks={resident}: the DiT has {spec.num_blocks} blocks, so none would move. "
            f"Say less than {spec.num_blocks}, or offload.dit=none."
        )
    moved = [name for name in COMPONENTS if offload.of(name) != "none"]
    if moved and capabilities.host_shares_memory:
        where = f"{capabilities.device.name} shares the host's memory"
        text = f"offload of {', '.join(moved)} is left out, since it would save nothing: {where}"
        found.note("offload_shared_memory", text, changed=True)
        return Offload()
    if moved and not (capabilities.pinned_memory and capabilities.async_copy):
        found.note("offload_blocking", "offload: copies cannot run beside the computation on this device")
    return offload


def check_batch(recipe: Recipe, spec: ModelSpec, formats: Mapping[str, str | None], found: Findings) -> None:
    """Whether one drawing on random numbers can show that pictures do not depend on their mates."""
    asked, format = recipe.batch, formats["dit"]
    if asked > 1 and spec.num_experts:
        found.problems.append(
            f"batch={asked}: {spec.id} is a mixture of experts, and how many rows an expert takes depends on "
            "all pictures of a batch, so it cannot be shown that they stay as they are alone. Leave it out."
        )
    if asked > 1 and format is not None and input_spans(format)[0] and not format.endswith("_weight_only"):
        found.problems.append(
            f"batch={asked}: quantization.dit={format} has one scale for all rows of an input, so a picture "
            "would depend on its mates. Say quantization.dit=fp8_row, or leave batch out."
        )


def choose_graphs(
    recipe: Recipe, layout: Layout, offload: Offload, capabilities: Capabilities, found: Findings
) -> dict[str, bool]:
    """Whether the calls of the DiT and of the VAE are captured.

    A captured call reads fixed addresses, so what it reads must not be moved by offload. Where blocks hold
    exchanges between devices, those are captured too.
    """
    limits, graphs = capabilities.graphs, {}
    for name, asked in (("dit", recipe.graphs.dit), ("vae", recipe.graphs.vae)):
        moved = offload.of(name) != "none"
        apart = name == "dit" and layout.exchanges_in_blocks and not limits.collectives
        usable = limits.supported and not moved and not apart
        graphs[name] = usable and (limits.default_on if asked == "auto" else asked)
        if asked is True and not limits.supported:
            found.problems.append(
                f"graphs.{name}=true: backend {capabilities.device.backend} captures no graphs on "
                f"{capabilities.device.name}. Say graphs.{name}=auto, or false."
            )
        elif asked is True and moved:
            found.problems.append(
                f"graphs.{name}=true: captured graphs need weights that stay where they are, and "
                f"offload.{name} is {offload.of(name)}. Say offload.{name}=none, or graphs.{name}=auto."
            )
        elif asked == "auto" and limits.supported and limits.default_on and moved:
            text = f"graphs.{name} is off: captured graphs need weights that stay where they are"
            found.note("graphs_off", f"{text}, and offload.{name} is {offload.of(name)}")
        elif asked is True and apart:
            found.problems.append(
                f"graphs.{name}=true: {capabilities.device.name} captures no exchanges between devices, and "
                "this layout has them inside the blocks. Say graphs.dit=auto."
            )
    if recipe.graphs.memory_gib is not None and not any(graphs.values()):
        text = f"graphs.memory_gib={recipe.graphs.memory_gib:g} is for nothing: no call is captured"
        found.note("graphs_memory", text)
    if any(graphs.values()) and limits.failure_is_fatal:
        found.note("graphs", "graphs: a failed capture ends the process on this device")
    return graphs
