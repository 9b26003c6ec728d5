"""`portable-dit plan`: what a recipe means here or on another machine, before anything is loaded.

Exit code 0: it fits. 3: it does not. 2: the recipe is wrong.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from portable_dit.cli.options import JsonFlag, RecipeWish, StrictFlag, as_flags, recipe_flags
from portable_dit.cli.terminal import as_json

if TYPE_CHECKING:
    from portable_dit.capabilities import Capabilities, KernelLists
    from portable_dit.models.spec import ModelSpec, Workload
    from portable_dit.plan import Plan
    from portable_dit.recipe import Recipe

DOES_NOT_FIT = 3
MOST_LAYOUTS = 16
FIGURES = ("measured", "reference")  # keys that hold figures and decide nothing
LEAST_WIDTH = 60  # some environments set COLUMNS to 0, at which nothing would be shown


@recipe_flags
def plan(
    wish: RecipeWish,
    size: Annotated[str | None, typer.Option(metavar="WxH", help="The picture to plan for.")] = None,
    image_count: Annotated[int, typer.Option(min=0, help="Reference images of the request.")] = 0,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Plan for another machine, of a JSON file.")
    ] = None,
    explain_scaling: Annotated[
        bool, typer.Option("--explain-scaling", help="Rank the layouts of the machine by predicted time.")
    ] = False,
    devices: Annotated[
        int | None, typer.Option(min=1, help="With --explain-scaling: how many devices; else all.")
    ] = None,
    strict: StrictFlag = False,
    json: JsonFlag = False,
) -> None:
    """Say what would run where, what it needs, and whether it fits."""
    from portable_dit.catalog import read_spec
    from portable_dit.errors import RequestError
    from portable_dit.plan import make_plan

    recipe = wish.load()
    spec = read_spec(recipe)
    workload = make_workload(spec, size, image_count)
    capabilities, kernels = find_machine(machine, recipe)
    made = make_plan(recipe, spec, capabilities, kernels, workload, strict=strict)
    if devices is not None and not explain_scaling:
        raise RequestError("--devices: says for how many layouts are ranked. Say --explain-scaling too.")
    if explain_scaling:
        _explain_scaling(made, recipe, spec, capabilities, devices, json)
        return
    if json:
        typer.echo(json_text.dumps(made.as_dict()))
    else:
        show(made)
        if not made.fits and (other := _recipe_that_fits(made, capabilities, kernels)):
            typer.echo(other)
    raise typer.Exit(0 if made.fits else DOES_NOT_FIT)


def _explain_scaling(
    plan: Plan, recipe: Recipe, spec: ModelSpec, capabilities: Capabilities, devices: int | None, json: bool
) -> None:
    """The layouts of the machine, the quickest first, with the numbers and the request of a plan."""
    from portable_dit.models.spec import COMPONENTS, Numbers
    from portable_dit.plan import branches
    from portable_dit.scaling import rank_layouts, table

    found = rank_layouts(
        spec,
        capabilities,
        plan.workload,
        numbers={name: Numbers(plan.dtype[name], plan.formats[name], plan.keep) for name in COMPONENTS},
        offload=plan.offload,
        steps=plan.steps,
        branches=branches(recipe, spec),
        devices=devices,
        device_limit=plan.bytes.device_limit,
        keep_what_fits=recipe.offload.resident_blocks is None,
    )
    count = devices or capabilities.count
    if count > capabilities.count:
        there = f"{capabilities.count} of {plan.device} are there"
        typer.echo(f"note: {there}; the layouts suppose {count}", err=True)
    moved = [f"offload.{name}={place}" for name in COMPONENTS if (place := plan.offload.of(name)) != "none"]
    if moved:
        said = " and ".join(moved)
        typer.echo(f"note: the time to bring weights from the host ({said}) is not counted", err=True)
    if json:
        typer.echo(as_json([asdict(prediction) for prediction in found]))
        return
    from rich.console import Console

    console = Console()
    rows = _table("layout", "step\nms", "of which\nexchanges", "request\ns", "peak\nGiB", "images\nan hour")
    console.width = max(console.width, LEAST_WIDTH)
    for row in table(found, most=MOST_LAYOUTS):
        rows.add_row(*row)
    where = f"{count} x {plan.device}"
    with console.capture() as told:
        console.print(f"{plan.model} at {plan.workload.width}x{plan.workload.height} on {where}")
        console.print(rows)
    more = len(found) - MOST_LAYOUTS
    rest = f"{more} slower ones are left out: --json has all.\n" if more > 0 else ""
    typer.echo(
        f"{told.get()}{rest}Text encoder, tiles and experts use the same devices: --json has every key.\n"
        "Predicted from declared figures, not measured: docs/scaling.md."
    )


def make_workload(spec: ModelSpec, size: str | None, image_count: int) -> Workload:
    """The request that a plan is made for. Raises RequestError when it is none that the model can take."""
    from portable_dit.errors import RequestError
    from portable_dit.models.spec import Workload
    from portable_dit.request import parse_size

    if image_count > spec.max_references:
        most = f"{spec.id} takes at most {spec.max_references}"
        raise RequestError(f"references: {image_count} were given and {most}. Say fewer.")
    width, height = spec.sizes.default if size is None else parse_size(size)
    canvas = spec.sizes.nearest(width, height)  # the plan itself refuses an illegal one
    reference = spec.reference_size(*spec.sizes.default, canvas=canvas)
    return Workload(width, height, spec.prompt_tokens, (reference,) * image_count)


def find_machine(machine: str | None, recipe: Recipe) -> tuple[Capabilities, KernelLists | None]:
    """The machine to plan for and the kernels it has; None when its backend is not installed here.

    Of this machine also what is in use already.
    """
    from portable_dit.machine_file import load_machine
    from portable_dit.plugins import load_plugins, select_backend
    from portable_dit.setup import look_at

    plugins = load_plugins()
    if machine is not None:
        capabilities = load_machine(machine)
        owner = plugins.backends.get(capabilities.device.backend)
        return capabilities, None if owner is None else owner.kernel_lists()
    chosen = select_backend(recipe.device.backend, plugins)
    return look_at(chosen, chosen.devices()[0], recipe), chosen.kernel_lists()


def _recipe_that_fits(plan: Plan, capabilities: Capabilities, kernels: KernelLists | None) -> str | None:
    """A sentence on the first recipe by name, for this model and this very device, in which the request fits.

    With all that the flags say, else with nothing of it but a limit on the device's memory.
    """
    flags = {key: value for key, value in plan.values.items() if plan.provenance[key] == "flag"}
    if name := _first_that_fits(plan, flags, capabilities, kernels):
        return f"A recipe for it that fits: --recipe {name}"
    kept = {key: flags[key] for key in flags if key == "device.memory_gib"}
    if kept != flags and (name := _first_that_fits(plan, kept, capabilities, kernels)):
        rest = ", ".join(key for key in flags if key not in kept)
        return f"A recipe for it that fits, without {rest}: --recipe {name}"
    return None


def _first_that_fits(
    plan: Plan, flags: Mapping[str, Any], capabilities: Capabilities, kernels: KernelLists | None
) -> str | None:
    from portable_dit.catalog import load_recipe, named_recipes, read_spec
    from portable_dit.errors import UserError
    from portable_dit.plan import make_plan

    for name, path in named_recipes().items():
        try:
            recipe = load_recipe(path, flags)
            device = recipe.device.name
            if recipe.model != plan.model or not device or not plan.device.startswith(device):
                continue
            if make_plan(recipe, read_spec(recipe), capabilities, kernels, plan.workload).fits:
                return name
        except UserError:  # it is for more devices than this machine has, say
            continue
    return None


def show(plan: Plan) -> None:
    """The plan as tables on stdout."""
    from rich.console import Console

    console = Console()
    console.width = max(console.width, LEAST_WIDTH)
    with console.capture() as told:  # printed by us, so that a closed stdout is what it is elsewhere
        _show(console, plan)
    typer.echo(told.get(), nl=False)


def _show(console: Any, plan: Plan) -> None:
    from rich.text import Text

    from portable_dit.kernel_choice import UNKNOWN

    where = f"{plan.model} on {plan.device} ({plan.backend})"
    work = plan.workload
    references = f", {len(work.reference_sizes)} references" if work.reference_sizes else ""
    console.print(Text(f"{where}, {work.width}x{work.height}{references}", style="bold"))
    console.print(_recipe_table(plan))
    console.print(Text("Keys at their defaults are left out: --json has all."))
    if any(kernel != UNKNOWN for chosen in plan.kernels.values() for kernel in chosen.values()):
        console.print(_kernel_table(plan))
    console.print(_bytes_table(plan))
    for line in _figures(plan):
        console.print(Text(line), soft_wrap=True)
    for note in plan.notes:
        console.print(Text(f"note: {note.text}", style="yellow" if note.changed else ""))
    console.print(Text(plan.verdict, style="bold green" if plan.fits else "bold red"))
    if not plan.fits and (flags := as_flags(plan.verdict)):
        console.print(Text(flags), soft_wrap=True)


def _recipe_table(plan: Plan) -> Any:
    """What the recipe and the flags say, and what was decided where they say nothing."""
    table = _table("recipe", "value", "from")
    for key, value in plan.values.items():
        if plan.provenance[key] != "default" and key not in FIGURES and value not in ("", None):
            table.add_row(key, _say(value), plan.provenance[key])
    for name, dtype in plan.dtype.items():
        table.add_row(f"{name} runs in", plan.formats[name] or dtype, "plan")
    for name, on in plan.graphs.items():
        table.add_row(f"{name} graphs", "on" if on else "off", "plan")
    if plan.values["sampling.steps"] is None:
        table.add_row("sampling.steps", str(plan.steps), "plan")
    if plan.values["executor"] == "auto":
        table.add_row("executor", plan.executor, "plan")
    return table


def _figures(plan: Plan) -> list[str]:
    """What was measured with the recipe and what others published, one figure a line."""
    return [f"{key}: {name}: {_say(figure)}" for key in FIGURES for name, figure in plan.values[key].items()]


def _kernel_table(plan: Plan) -> Any:
    table = _table("component", "op", "kernel", "not taken, and why")
    for component in plan.kernels:
        for op, kernel in plan.choices(component).items():
            refused = [r for r in plan.refusals if (r.component, r.op) == (component, op)]
            table.add_row(component, op, kernel, "\n".join(f"{r.kernel}: {r.detail}" for r in refused))
    return table


def _bytes_table(plan: Plan) -> Any:
    table = _table("memory", "weights", "activations", "device in that stage")
    sizes = plan.bytes
    table.add_row("load", "", "", _gib(sizes.stages["load"]))
    for name, size in sizes.components.items():
        table.add_row(name, _gib(size.weights), _gib(size.activations), _gib(sizes.stages[name]))
    table.add_row("peak", "", "", _gib(sizes.peak), style="bold")
    if sizes.graphs:
        table.add_row("graphs, at most", "", "", _gib(sizes.graphs))
    if not sizes.shared:
        table.add_row("host", _gib(sizes.host), f"{_gib(sizes.pinned)} pinned", "")
    for kind, sent in plan.traffic.items():
        table.add_row("sent in a step", "", kind, f"{sent / 1e6:,.1f} MB")
    return table


def _table(*columns: str) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _say(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_say(inner)}" for name, inner in value.items())
    return ", ".join(map(_say, value)) if isinstance(value, tuple | list) else str(value)
