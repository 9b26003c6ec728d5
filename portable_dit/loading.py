"""From a recipe to a model that is ready to draw.

`set_up` decides everything and loads nothing: recipe, spec, backend, plan. `load_model` then builds on the
meta device, swaps quantised layers in, streams weights, binds kernels and arranges offload. A wish that
cannot be met is refused by the first, before the second touches a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable_dit.capabilities import Capabilities, Device
from portable_dit.catalog import checkpoint_folder, find_family, load_recipe, read_spec
from portable_dit.errors import BackendError, DoesNotFitError, RequestError, WeightsError
from portable_dit.models import RANDOM
from portable_dit.models.spec import (
    COMPONENTS,
    Family,
    Model,
    ModelSpec,
    TileRunner,
    Workload,
    run_eagerly,
)
from portable_dit.plan import Plan, make_plan
from portable_dit.plugins import select_backend
from portable_dit.recipe import Recipe
from portable_dit.request import Request, ResolvedRequest, validate_request

if TYPE_CHECKING:
    from torch import nn

    from portable_dit.backend import Backend
    from portable_dit.graphs import Graphs
    from portable_dit.offload import ComponentOffload, LayerOffload
    from portable_dit.sampling import BlockRunner
    from portable_dit.weights import Checkpoint

HOST = "cpu"  # what torch calls the memory that offloaded weights rest in


@dataclass(frozen=True)
class Setup:
    """Everything that was decided for a recipe on this machine, before anything is loaded."""

    recipe: Recipe
    family: Family
    spec: ModelSpec
    backend: Backend
    device: Device
    capabilities: Capabilities
    plan: Plan
    strict: bool

    @property
    def notes(self) -> tuple[str, ...]:
        """Everything a person may want to know of how the recipe is met; `changes` are among them."""
        return (*(note.text for note in self.plan.notes if not note.changed), *self.changes)

    @property
    def changes(self) -> tuple[str, ...]:
        """Wishes that are met in another way than they were written."""
        return tuple(note.text for note in self.plan.notes if note.changed)

    def resolve(self, request: Request) -> ResolvedRequest:
        """The request with all defaults filled in, refused when it breaks a rule or does not fit."""
        resolved = resolve_request(request, self.recipe, self.spec, strict=self.strict)
        self.require_fit(resolved)
        return resolved

    def require_fit(self, request: ResolvedRequest) -> None:
        """Raises DoesNotFitError when this request needs more memory than there is."""
        workload = Workload(
            width=request.width,
            height=request.height,
            prompt_tokens=self.spec.prompt_tokens,
            reference_sizes=tuple(reference.size for reference in request.references),
        )
        plan = self.plan
        if workload != plan.workload:
            kernels = self.backend.kernel_lists()
            strict = self.strict
            plan = make_plan(self.recipe, self.spec, self.capabilities, kernels, workload, strict=strict)
        _require_fit(plan)


def resolve_request(
    request: Request, recipe: Recipe, spec: ModelSpec, *, strict: bool = False
) -> ResolvedRequest:
    """The request with the defaults of recipe and model filled in. Raises RequestError. Torch-free."""
    steps, scale = recipe.sampling.steps, recipe.sampling.guidance_scale
    request = replace(
        request,
        steps=steps if request.steps is None else request.steps,
        guidance_scale=scale if request.guidance_scale is None else request.guidance_scale,
    )
    resolved = validate_request(request, spec)
    if strict and resolved.notes:
        raise RequestError("\n".join(f"strict: {note}" for note in resolved.notes))
    return resolved


def set_up(
    recipe: Recipe | str | Path, overrides: Mapping[str, Any] | None = None, *, strict: bool = False
) -> Setup:
    """The decisions for a recipe, or one error that says all that is wrong with it. Loads nothing."""
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides)
    spec = read_spec(recipe)
    backend = select_backend(recipe.device.backend)
    device = backend.devices()[0]
    capabilities = backend.capabilities(device)
    plan = make_plan(recipe, spec, capabilities, backend.kernel_lists(), strict=strict)
    return Setup(recipe, find_family(recipe.model), spec, backend, device, capabilities, plan, strict)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model with its weights, the calls that are captured, and the components that visit the device."""

    model: Model
    graphs: Graphs
    captured: Mapping[str, bool]
    visitors: Mapping[str, ComponentOffload]
    streamed: tuple[LayerOffload, ...]
    bytes_read: int

    @property
    def run_blocks(self) -> BlockRunner:
        """How the blocks of the DiT are called."""
        from portable_dit.sampling import run_blocks

        return self.graphs.blocks if self.captured["dit"] else run_blocks

    @property
    def run_tiles(self) -> TileRunner:
        """How a batch of VAE tiles is decoded."""
        return self.graphs.tiles if self.captured["vae"] else run_eagerly

    @contextmanager
    def on_device(self, *components: str) -> Iterator[None]:
        """The named components have their weights on the device inside."""
        with ExitStack() as stack:
            for name in components:
                if name in self.visitors:
                    stack.enter_context(self.visitors[name].on_device())
            yield

    def release(self) -> None:
        """Takes offload apart; weights go when nobody holds the model."""
        for layers in self.streamed:
            layers.remove()


def load_model(setup: Setup, *, on_component: Callable[[str], None] = lambda name: None) -> LoadedModel:
    """The model of a setup, ready to draw. on_component: told each component's name as its turn comes."""
    import torch

    from portable_dit.graphs import Graphs

    _require_fit(setup.plan)
    checkpoint = _open_checkpoint(setup)
    setup.backend.activate(setup.device)
    plan, spec = setup.plan, setup.spec
    dtypes: dict[str, torch.dtype] = {name: getattr(torch, plan.dtype[name]) for name in COMPONENTS}
    with _uninitialised():
        model = setup.family.build(spec, dtypes)
    bytes_read = 0
    for name in COMPONENTS:
        on_component(name)
        module = model.component(name)
        _quantize(module, name, setup)
        bytes_read += _fill(model, name, checkpoint, setup)
        _require_quantized(module, name, setup)
        _bind(module, name, setup)
    model.finish_loading(model.schedule(plan.steps or spec.steps[0]))
    visitors, streamed = _offload(model, setup)
    setup.backend.synchronize(setup.device)
    graphs = Graphs(setup.backend, max_live=setup.capabilities.graphs.max_live)
    return LoadedModel(model, graphs, plan.graphs, visitors, streamed, bytes_read)


def _uninitialised() -> AbstractContextManager[object]:
    """Modules made inside skip their random start, which the weights replace.

    On the meta device there is nothing to fill, yet torch (2.13) imports its whole compiler for `normal_`
    there, which takes two seconds.
    """
    from torch.overrides import TorchFunctionMode

    class Uninitialised(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            named = kwargs or {}
            if getattr(function, "__module__", None) == "torch.nn.init":
                return named["tensor"]
            return function(*args, **named)

    return Uninitialised()


def _require_fit(plan: Plan) -> None:
    if not plan.fits:
        workload = plan.workload
        raise DoesNotFitError(
            f"{plan.model} at {workload.width}x{workload.height} on {plan.device} {plan.verdict}"
        )


def _quantize(module: nn.Module, name: str, setup: Setup) -> None:
    from portable_dit.quantize import quantize

    plan = setup.plan
    format = plan.formats[name]
    if format is not None:
        quantize(
            module,
            format=format,
            keep=plan.keep,
            only=plan.only[name],
            backend=setup.backend,
            kernel_id=plan.choices(name)[f"linear:{format}"],
            capabilities=setup.capabilities,
            rows=setup.spec.rows(plan.workload),
        )


def _require_quantized(module: nn.Module, name: str, setup: Setup) -> None:
    """A format that reached no layer would draw the very picture of the unquantised model."""
    from portable_dit.quantize import quantization_report

    format = setup.plan.formats[name]
    if format is not None and quantization_report(module).layers == 0:
        raise BackendError(
            f"quantization.{name}={format}: no layer of the {name} holds such a weight after loading. "
            "Leave the format out, or report this as a bug."
        )


def _open_checkpoint(setup: Setup) -> Checkpoint | None:
    """The recipe's checkpoint, None for random weights. Raises WeightsError when it is not here."""
    from portable_dit.weights import Checkpoint

    recipe = setup.recipe
    if recipe.weights == RANDOM:
        return None
    folder = checkpoint_folder(recipe)
    if folder is None:
        raise WeightsError(
            f"weights: {recipe.weights}: not on this machine, and nothing is downloaded while loading. "
            f"Fetch it first (hf download {recipe.weights} --local-dir FOLDER), then --set weights=FOLDER."
        )
    return Checkpoint.open(folder)


def _fill(model: Model, name: str, checkpoint: Checkpoint | None, setup: Setup) -> int:
    """Weights into a component, each tensor where it rests; gives the bytes read."""
    from portable_dit.weights import fill_random, load_component

    module, family = model.component(name), setup.family
    device = _resting_place(model, name, setup)
    if checkpoint is None:
        fill_random(module, device=device)
        return 0
    stored = checkpoint.tensors(family.folder(name))
    shapes = {key: tensor.shape for key, tensor in stored.items()}
    tensor_map = family.tensor_map(name, shapes, setup.spec)
    return load_component(
        module,
        stored,
        sources=tensor_map.sources,
        unused=tensor_map.unused,
        device=device,
        title=str(checkpoint.folder / family.folder(name)),
    )


def _resting_place(model: Model, name: str, setup: Setup) -> Callable[[str], str]:
    """Where each tensor of a component rests: on the device, or on the host for what is offloaded."""
    placement, device = setup.plan.offload.of(name), setup.device.torch_device
    if placement == "none":
        return lambda tensor: device
    if placement == "component":
        return lambda tensor: HOST
    from portable_dit.offload import streamed_blocks

    path, blocks = _blocks(model, name)
    streamed = streamed_blocks(len(blocks), _resident(name, setup))
    prefixes = tuple(f"{path}.{index}." for index in streamed)
    return lambda tensor: HOST if tensor.startswith(prefixes) else device


def _bind(module: nn.Module, name: str, setup: Setup) -> None:
    from portable_dit.bind import bind

    bind(module, setup.backend, setup.plan.choices(name))


def _offload(model: Model, setup: Setup) -> tuple[dict[str, ComponentOffload], tuple[LayerOffload, ...]]:
    from portable_dit.offload import ComponentOffload, offload

    visitors: dict[str, ComponentOffload] = {}
    streamed = []
    for name in COMPONENTS:
        placement, module = setup.plan.offload.of(name), model.component(name)
        if placement == "component":
            visitors[name] = ComponentOffload(module, setup.backend, setup.device)
        elif placement == "layerwise":
            _, blocks = _blocks(model, name)
            resident = _resident(name, setup)
            streamed.append(offload(list(blocks), resident, setup.backend, setup.device))
    return visitors, tuple(streamed)


def _blocks(model: Model, name: str) -> tuple[str, nn.ModuleList]:
    """The equal blocks of a component, and the name of their list in it."""
    from torch import nn

    path = model.blocks_name(name)
    blocks = model.component(name).get_submodule(path)
    assert isinstance(blocks, nn.ModuleList)
    return path, blocks


def _resident(name: str, setup: Setup) -> int:
    """How many of a component's blocks stay on the device for good."""
    return setup.plan.offload.resident_blocks if name == "dit" else 0
