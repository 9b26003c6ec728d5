"""From a setup to a model that is ready to draw.

`load_model` builds on the meta device, swaps quantised layers in, streams weights, binds kernels and arranges
offload. What cannot be met was refused before, in `setup`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable_dit.catalog import adapter_places, checkpoint_folder
from portable_dit.errors import BackendError, WeightsError
from portable_dit.loaded import LoadedModel
from portable_dit.models import RANDOM
from portable_dit.models.spec import COMPONENTS, Model, ModelSpec, matches
from portable_dit.paths import told_what_is_hidden
from portable_dit.recipe_rules import memory_limit
from portable_dit.safetensors_file import ITEM_BYTES
from portable_dit.setup import HOST, Setup, require_fit

if TYPE_CHECKING:
    from torch import nn

    from portable_dit.lora import Additions
    from portable_dit.models.spec import TensorSource
    from portable_dit.offload import ComponentOffload, LayerOffload
    from portable_dit.parallel.mesh import Mesh
    from portable_dit.parallel.parts import Parts
    from portable_dit.safetensors_file import StoredTensor
    from portable_dit.weight_cache import CachedWeights
    from portable_dit.weights import Checkpoint

log = logging.getLogger("portable_dit")
NOT_FETCHED = (
    "not on this machine, and this setup was not fetched. Call portable_dit.setup.fetch first, or load it "
    "with Engine.load, which does."
)


@told_what_is_hidden()
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

    require_fit(setup.plan)
    checkpoint = _open_checkpoint(setup)
    setup.backend.activate(setup.device)
    _limit_memory(setup)
    plan, spec = setup.plan, setup.spec
    dtypes: dict[str, torch.dtype] = {name: getattr(torch, plan.dtype[name]) for name in COMPONENTS}
    with _uninitialised():
        model = setup.family.build(spec, dtypes)
    added = _additions(model, setup)
    parts, bytes_read = _parts(mesh, spec), 0
    for name in COMPONENTS:
        on_component(name)
        module = model.component(name)
        if parts is not None:
            with _uninitialised():
                parts.shrink(name, module)
        _quantize(module, name, setup)
        bytes_read += _fill(model, name, checkpoint, setup, parts, added, partial(on_bytes, name))
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
        raise WeightsError(f"weights: {recipe.weights}: {NOT_FETCHED}")
    return Checkpoint.open(folder)


def _additions(model: Model, setup: Setup) -> Additions:
    """What the recipe's adapters add to the DiT. Raises WeightsError before a weight is read."""
    from portable_dit.lora import Additions, add, read_adapter

    places = adapter_places(setup.recipe)
    if not places:
        return Additions()
    from portable_dit.slots import targets_of

    adapters = []
    for words, (place, scale) in zip(setup.recipe.lora, places, strict=True):
        if place is None:
            raise WeightsError(f"lora: {words}: {NOT_FETCHED}")
        adapters.append(read_adapter(place, scale))
        ranks = sorted({low.down.shape[0] for low in adapters[-1].layers.values()})
        log.info("lora: %s: %d layers, rank %s", words, len(adapters[-1].layers), ", ".join(map(str, ranks)))
    shapes = {name: target.shape for name, target in targets_of(model.component("dit")).items()}
    return add(adapters, setup.family.stored_rows("dit", shapes, setup.spec), shapes)


def _fill(
    model: Model,
    name: str,
    checkpoint: Checkpoint | None,
    setup: Setup,
    parts: Parts | None,
    added: Additions,
    on_bytes: Callable[[int, int], None],
) -> int:
    """Weights into a component, each tensor where it rests; gives the bytes read."""
    from portable_dit.lora import Additions
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
    added = added if name == "dit" else Additions()
    _log_double_rounding(added, tensor_map.sources, stored)
    with _cached(module, stored, name, place, setup, parts, added) as cache:
        return load_component(
            module,
            stored,
            sources=tensor_map.sources,
            unused=unused,
            device=device,
            encode_on=compute,
            title=str(place),
            shares=shares,
            changes=added.changes,
            cache=cache,
            on_bytes=on_bytes,
        )


def _log_double_rounding(
    added: Additions, sources: Mapping[str, TensorSource], stored: Mapping[str, StoredTensor]
) -> None:
    """Tells of weights that were rounded once when they were stored, and are again when they are changed."""
    parts = {name: sources[name].names for name in added.changes if name in sources}
    twice = sum(any(ITEM_BYTES[stored[part].dtype] == 1 for part in names) for names in parts.values())
    if twice:
        log.info(
            "lora: %d of %d changed weights are stored in 8 bits or fewer: expanded, then changed",
            twice,
            len(parts),
        )


def _cached(
    module: nn.Module,
    stored: Mapping[str, StoredTensor],
    name: str,
    place: Path,
    setup: Setup,
    parts: Parts | None,
    added: Additions,
) -> AbstractContextManager[CachedWeights | None]:
    """The cache entry of a quantised component, None when the recipe wants none."""
    format = setup.plan.formats[name]
    if not setup.recipe.cache or format is None:
        return nullcontext()
    from portable_dit.weight_cache import CachedWeights

    title, changed_by = f"{place} as {format}", [adapter.identity for adapter in added.adapters]
    if parts is None:
        return CachedWeights(module, stored, title=title, changed_by=changed_by)
    label = parts.label(name)
    return CachedWeights(
        module,
        stored,
        title=f"{title}, part {label}" if label else title,
        part=label,
        changed_by=changed_by,
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
