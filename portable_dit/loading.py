"""From a recipe to a model that is ready to draw.

`set_up` decides everything and loads nothing: recipe, spec, backend, plan. `load_model` then builds on the
meta device, swaps quantised layers in, streams weights, binds kernels and arranges offload. A wish that
cannot be met is refused by the first, before the second touches a byte.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable_dit import host
from portable_dit.capabilities import Capabilities, Device
from portable_dit.catalog import (
    checkpoint_folder,
    fetch_spec,
    fetch_weights,
    find_family,
    is_remote,
    load_recipe,
    read_spec,
)
from portable_dit.errors import BackendError, DoesNotFitError, RecipeError, RequestError, WeightsError
from portable_dit.loaded import LoadedModel
from portable_dit.models import RANDOM
from portable_dit.models.spec import (
    COMPONENTS,
    Family,
    Model,
    ModelSpec,
    matches,
)
from portable_dit.plan import Plan, make_plan
from portable_dit.plugins import select_backend
from portable_dit.recipe import Recipe
from portable_dit.recipe_rules import memory_limit
from portable_dit.request import Request, ResolvedRequest, validate_request

if TYPE_CHECKING:
    from torch import nn

    from portable_dit.backend import Backend
    from portable_dit.offload import ComponentOffload, LayerOffload
    from portable_dit.parallel.mesh import Mesh
    from portable_dit.parallel.parts import Parts
    from portable_dit.safetensors_file import StoredTensor
    from portable_dit.weight_cache import CachedWeights
    from portable_dit.weights import Checkpoint

GIB = 1 << 30
log = logging.getLogger("portable_dit")
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
        """Raises DoesNotFitError when this request needs more memory than there is.

        Strict, RequestError when its images do not fit side by side as the recipe wants them.
        """
        plan = self.plan_of(request)
        _require_fit(plan)
        wanted, fits = min(self.recipe.batch, request.images), plan.workload.batch
        if self.strict and fits < wanted:
            at = f"{request.width}x{request.height}"
            problem = f"strict: batch={wanted}: {fits} of {at} fit side by side. Say batch={fits}."
            raise RequestError(problem, [("images", problem)])

    def plan_of(self, request: ResolvedRequest) -> Plan:
        """The plan as it is for this request, whose memory may differ from that of the default picture."""
        workload = replace(
            self.plan.workload,
            width=request.width,
            height=request.height,
            reference_sizes=tuple(reference.size for reference in request.references),
        )
        if workload == self.plan.workload:
            return self.plan
        recipe, offload = self.recipe, self.plan.offload
        if offload.dit == "layerwise":  # blocks stay where they were loaded
            stay = recipe.offload.model_copy(update={"resident_blocks": offload.resident_blocks})
            recipe = recipe.model_copy(update={"offload": stay})
        kernels, strict = self.backend.kernel_lists(), self.strict
        return make_plan(recipe, self.spec, self.capabilities, kernels, workload, strict=strict)


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
    recipe: Recipe | str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    strict: bool = False,
    rank: int = 0,
) -> Setup:
    """The decisions for a recipe, or one error that says all that is wrong with it. Loads nothing.

    rank: which of this host's devices it is for, where the layout has several; counted anew beyond the last.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides)
    elif overrides:
        raise RecipeError("overrides: this recipe is loaded already. Give them to load_recipe.")
    spec = read_spec(recipe)
    backend = select_backend(recipe.device.backend)
    if backend.id != HOST:  # on the host pictures come and go, and keep a third more memory with large pages
        host.ask_for_huge_pages()
    devices = backend.devices()
    device = devices[rank % len(devices)]
    capabilities = backend.capabilities(device)
    plan = make_plan(recipe, spec, capabilities, backend.kernel_lists(), strict=strict)
    require_packages(spec)
    if plan.executor == "ray" and find_spec("ray") is None:
        raise RecipeError(
            "executor=ray: the package ray is not installed. Type: pip install 'portable-dit[ray]', or say "
            "executor=mp, which needs no more than one host."
        )
    return Setup(recipe, find_family(recipe.model), spec, backend, device, capabilities, plan, strict)


def fetch(setup: Setup) -> Setup:
    """The setup with its weights on this machine: downloaded if they are on a hub and not here yet.

    What was decided from published sizes is decided anew from the checkpoint's own configs, which come first,
    so that what does not fit is refused before the weights are downloaded.
    """
    if setup.recipe.weights == RANDOM or not is_remote(setup.recipe):
        return setup
    spec = fetch_spec(setup.recipe)
    if spec is not None:
        kernels = setup.backend.kernel_lists()
        _require_fit(make_plan(setup.recipe, spec, setup.capabilities, kernels, strict=setup.strict))
    fetch_weights(setup.recipe)
    return set_up(setup.recipe, strict=setup.strict)


def load_model(
    setup: Setup,
    *,
    mesh: Mesh | None = None,
    on_component: Callable[[str], None] = lambda name: None,
    on_bytes: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> LoadedModel:
    """The model of a setup, ready to draw. on_component: told each component's name as its turn comes.

    mesh: with it, this rank's part of the model. on_bytes: told the bytes of a component that were read, and
    how many there are.
    """
    import torch

    from portable_dit.batches import Batches
    from portable_dit.graphs import Graphs
    from portable_dit.prompt_cache import PromptCache

    _require_fit(setup.plan)
    checkpoint = _open_checkpoint(setup)
    setup.backend.activate(setup.device)
    _limit_memory(setup)
    plan, spec = setup.plan, setup.spec
    dtypes: dict[str, torch.dtype] = {name: getattr(torch, plan.dtype[name]) for name in COMPONENTS}
    with _uninitialised():
        model = setup.family.build(spec, dtypes)
    parts, bytes_read = _parts(mesh, spec), 0
    for name in COMPONENTS:
        on_component(name)
        module = model.component(name)
        if parts is not None:
            with _uninitialised():
                parts.shrink(name, module)
        _quantize(module, name, setup)
        bytes_read += _fill(model, name, checkpoint, setup, parts, partial(on_bytes, name))
        _require_quantized(module, name, setup)
        if parts is not None:
            parts.agree(name, module, _divided_blocks(model, name))
        _bind(module, name, setup)
        if parts is not None:
            _connect(parts, model, name, setup)
    model.finish_loading(model.schedule(plan.steps), setup.device.torch_device)
    visitors, streamed = _offload(model, setup)
    setup.backend.synchronize(setup.device)
    graphs = Graphs(
        setup.backend,
        setup.device,
        max_live=setup.capabilities.graphs.max_live,
        agree=_agreement(mesh, setup),
    )
    prompts = PromptCache(setup.recipe.prompt_cache_mib << 20, _encoder_identity(setup))
    return LoadedModel(
        model, graphs, plan.graphs, visitors, streamed, bytes_read, prompts, Batches(mesh), mesh
    )


def _agreement(mesh: Mesh | None, setup: Setup) -> Callable[[bool], bool] | None:
    """How ranks whose captured blocks hold exchanges decide together what to capture."""
    if mesh is None or not setup.plan.graphs["dit"] or not setup.plan.layout.exchanges_in_blocks:
        return None
    return partial(mesh.all_in_blocks, device=setup.device.torch_device)


def _limit_memory(setup: Setup) -> None:
    """Holds the process to the recipe's memory, so that it cannot take what was planned for others."""
    asked, device = setup.recipe.device.memory_gib, setup.device
    limit = memory_limit(setup.recipe, setup.capabilities)
    if asked and not setup.backend.limit_memory(device, limit):
        log.warning(
            "device.memory_gib=%g: planned with, and not enforced: %s has no limit", asked, device.name
        )


def _encoder_identity(setup: Setup) -> str:
    """What tells this text encoder's states from those of another set-up."""
    plan, name = setup.plan, "text_encoder"
    return repr((plan.model, setup.recipe.weights, plan.dtype[name], plan.formats[name], plan.choices(name)))


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


def require_packages(spec: ModelSpec) -> None:
    """Raises RecipeError when a package that the model runs on is not installed here."""
    for module, advice in spec.requires.items():
        if find_spec(module) is None:
            raise RecipeError(
                f"model: {spec.id} runs on the package {module}, which is not installed. Type: {advice}"
            )


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
            kernel_id=plan.choices(name).get(f"linear:{format}"),
            expert_kernel_id=plan.choices(name).get(f"experts:{format}"),
            capabilities=setup.capabilities,
            rows=setup.spec.rows(plan.workload),
        )


def _require_quantized(module: nn.Module, name: str, setup: Setup) -> None:
    """A format that reached no layer would draw the very picture of the unquantised model.

    Logs what each kind of layer runs on, one line each.
    """
    from portable_dit.quantize import quantization_report

    format = setup.plan.formats[name]
    if format is None:
        return
    report = quantization_report(module)
    dense = report.layers - report.mixtures
    for op, what, count in (("linear", "dense", dense), ("experts", "expert", report.mixtures)):
        if count:
            kernel = setup.plan.choices(name)[f"{op}:{format}"]
            log.info("%s: %d %s layers in %s, kernel %s", name, count, what, format, kernel)
    if report.layers == 0:
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
            f"weights: {recipe.weights}: not on this machine, and this setup was not fetched. Call "
            "portable_dit.loading.fetch first, or load it with Engine.load, which does."
        )
    return Checkpoint.open(folder)


def _fill(
    model: Model,
    name: str,
    checkpoint: Checkpoint | None,
    setup: Setup,
    parts: Parts | None,
    on_bytes: Callable[[int, int], None],
) -> int:
    """Weights into a component, each tensor where it rests; gives the bytes read."""
    from portable_dit.weights import fill_random, load_component, marker_texts

    module, family = model.component(name), setup.family
    device, compute = _resting_place(model, name, setup), setup.device.torch_device
    shares = {} if parts is None else parts.shares(name, module)
    elsewhere = () if parts is None else parts.elsewhere(name, module)
    if checkpoint is None:
        fill_random(module, device=device, draw_on=compute, shares=shares, on_tensor=on_bytes)
        return 0
    places = family.places(name, setup.spec)
    place, stored = checkpoint.folder / places[0], checkpoint.tensors(*places)
    shapes = {key: tensor.shape for key, tensor in stored.items()}
    tensor_map = family.tensor_map(name, shapes, setup.spec, texts=marker_texts(stored))
    unused = tensor_map.unused | {part for ours in elsewhere for part in tensor_map.sources[ours].names}
    with _cached(module, stored, name, place, setup, parts) as cache:
        return load_component(
            module,
            stored,
            sources=tensor_map.sources,
            unused=unused,
            device=device,
            encode_on=compute,
            title=str(place),
            shares=shares,
            cache=cache,
            on_bytes=on_bytes,
        )


def _cached(
    module: nn.Module,
    stored: Mapping[str, StoredTensor],
    name: str,
    place: Path,
    setup: Setup,
    parts: Parts | None,
) -> AbstractContextManager[CachedWeights | None]:
    """The cache entry of a quantised component, None when the recipe wants none."""
    format = setup.plan.formats[name]
    if not setup.recipe.cache or format is None:
        return nullcontext()
    from portable_dit.weight_cache import CachedWeights

    title = f"{place} as {format}"
    if parts is None:
        return CachedWeights(module, stored, title=title)
    label = parts.label(name)
    return CachedWeights(
        module,
        stored,
        title=f"{title}, part {label}" if label else title,
        part=label,
        keep=parts.is_first_with_its_part(name),
        agree=parts.all_have,
    )


def _resting_place(model: Model, name: str, setup: Setup) -> Callable[[str], str]:
    """Where each tensor of a component rests: on the device, or on the host for what is offloaded or will be
    dropped before the first picture.
    """
    placement, device = setup.plan.offload.of(name), setup.device.torch_device
    temporary = setup.spec.temporary if name == "dit" else ()
    if placement == "none":
        return lambda tensor: HOST if matches(tensor, temporary) else device
    if placement == "component":
        return lambda tensor: HOST
    from portable_dit.offload import streamed_blocks

    path, blocks = _blocks(model, name)
    streamed = streamed_blocks(len(blocks), _resident(name, setup))
    prefixes = tuple(f"{path}.{index}." for index in streamed)
    return lambda tensor: HOST if tensor.startswith(prefixes) or matches(tensor, temporary) else device


def _bind(module: nn.Module, name: str, setup: Setup) -> None:
    from portable_dit.bind import bind

    producers = setup.spec.producers if name == "dit" else ()
    bind(module, setup.backend, setup.plan.choices(name), producers=producers)


def _parts(mesh: Mesh | None, spec: ModelSpec) -> Parts | None:
    """What a rank of several makes of the model, None when there is one."""
    if mesh is None:
        return None
    from portable_dit.parallel.parts import Parts

    return Parts(mesh, spec.tensor_plan)


def _connect(parts: Parts, model: Model, name: str, setup: Setup) -> None:
    """Puts the exchanges between ranks around a component's bound seams."""
    with_lse = None
    if name == "dit" and setup.plan.layout.ring > 1:
        with_lse = setup.backend.attention_kernel(setup.plan.choices(name)["attention"]).run_with_lse
    parts.connect(name, model.component(name), _divided_blocks(model, name), with_lse)


def _divided_blocks(model: Model, name: str) -> nn.Module:
    """Where the rows of a step may be divided over ranks."""
    return _blocks(model, name)[1] if name == "dit" else model.component(name)


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
