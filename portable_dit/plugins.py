"""Discovery of backends and what else packages add, one plugin at a time, so that a broken one cannot take
the rest down.

pluggy calls all implementations of a hook in one go, and one that raises ends the call. Here each plugin is
imported, registered, checked and called alone; whatever goes wrong becomes its `PluginStatus.reason`. That
makes this the only file that catches `Exception`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from portable_dit import hooks
from portable_dit.errors import BackendError, near

if TYPE_CHECKING:
    from portable_dit.backend import Backend
    from portable_dit.models.spec import Family

T = TypeVar("T")
BUILT_IN = "cpu"


@dataclass(frozen=True)
class PluginStatus:
    """What became of one plugin. backends: ids that it brought. devices: names of the devices it found.

    reason: why it cannot be used, or, for one that is ok, why it found no device.
    """

    name: str
    origin: str
    ok: bool
    reason: str | None = None
    backends: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Additions:
    """What plugins bring beside backends and their kernels; to know it takes neither torch nor a device."""

    families: tuple[Family, ...] = ()
    recipe_folders: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Plugins:
    """Everything that was found. A backend here already carries the kernels that other plugins add to it."""

    backends: Mapping[str, Backend]
    status: tuple[PluginStatus, ...]


@dataclass(frozen=True)
class _Loaded:
    name: str
    module: object


def attempt(function: Callable[[], T]) -> tuple[T | None, str | None]:
    """(result, None), or (None, why not in one line). For foreign code whose errors we cannot know."""
    try:
        return function(), None
    except Exception as error:  # noqa: BLE001
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        return None, f"{type(error).__name__}: {error}{cause}".strip().replace("\n", " ")


def load_plugins() -> Plugins:
    """Finds the built-in backend and every installed plugin. Never raises because of a plugin."""
    loaded: list[_Loaded] = []
    status: list[PluginStatus] = []
    backends: dict[str, Backend] = {}
    for name, origin, load in _candidates():
        module, reason = attempt(load)
        brought: list[Backend] = []
        if reason is None:
            reason = _unfit(name, module)
        if reason is None:
            brought, reason = _backends_of(name, module, taken=backends)
        devices, trouble = ((), None) if reason else _devices_of(brought)
        reason = reason or trouble
        ids = tuple(backend.id for backend in brought)
        absence = None if reason or devices else _absence_of(brought)
        status.append(PluginStatus(name, origin, reason is None, reason or absence, ids, devices))
        if reason is None:
            loaded.append(_Loaded(name, module))
            backends |= {backend.id: backend for backend in brought}
    return _with_additions(backends, loaded, status)


def load_additions() -> Additions:
    """The model families and recipe folders of every installed plugin that can be imported.

    Asks none for a backend. A plugin that fails here adds nothing; `load_plugins` says why.
    """
    additions = Additions()
    for name, _, load in _installed():
        module, reason = attempt(load)
        if reason is None and _unfit(name, module) is None:
            more, _ = _more(_Loaded(name, module), additions)
            additions = more
    return additions


def select_backend(name: str | None = None, plugins: Plugins | None = None) -> Backend:
    """The backend of that name; without one, the only one that has a device other than the host, else the
    host.

    Raises BackendError when the name is unknown, its plugin is broken, it has no device here, or when several
    backends could be meant.
    """
    plugins = plugins or load_plugins()
    if name is not None and name != "auto":
        return _by_name(name, plugins)
    present = [s for s in plugins.status if s.ok and s.devices]
    with_device = [b for s in present for b in s.backends if b != BUILT_IN and plugins.backends[b].devices()]
    if len(with_device) > 1:
        raise BackendError(
            f"device.backend is not given and {len(with_device)} backends have a device here: "
            f"{', '.join(sorted(with_device))}. Name one, with device.backend in the recipe or --backend."
        )
    return plugins.backends[with_device[0] if with_device else BUILT_IN]


def _by_name(name: str, plugins: Plugins) -> Backend:
    broken = [s for s in plugins.status if not s.ok and name in (s.name, *s.backends)]
    if broken:
        raise BackendError(
            f"backend {name!r} was asked for and its plugin {broken[0].origin} cannot be used: "
            f"{broken[0].reason}. Repair or upgrade that package, or name another backend."
        )
    if name not in plugins.backends:
        way = f"In a clone of portable-dit, type: pip install ./backends/{name}."
        extra = f" {way}" if name in _extras() else ""
        raise BackendError(f"backend {name!r} is not installed.{extra}{near(name, list(plugins.backends))}")
    backend = plugins.backends[name]
    if not backend.devices():
        reason, trouble = attempt(backend.absence)
        why = f": {reason or trouble}" if reason or trouble else ""
        raise BackendError(
            f"backend {name!r} was asked for and finds no device here{why}. "
            "Run `portable-dit doctor` for what it looked for, or name another backend."
        )
    return backend


def _candidates() -> Iterable[tuple[str, str, Callable[[], object]]]:
    """(name, origin, how to import it): the built-in backend first, then what is installed."""

    def built_in() -> object:
        from portable_dit import cpu

        return cpu

    yield BUILT_IN, "built in", built_in
    yield from _installed()


def _installed() -> Iterable[tuple[str, str, Callable[[], object]]]:
    """The entry points in order of name."""
    for point in sorted(entry_points(group=hooks.ENTRY_POINT_GROUP), key=lambda p: (p.name, p.value)):
        yield point.name, _origin(point), point.load


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def _extras() -> Sequence[str]:
    try:
        return metadata("portable-dit").get_all("Provides-Extra") or []
    except PackageNotFoundError:
        return []


def _unfit(name: str, module: object) -> str | None:
    """Why pluggy would not take this plugin: hooks that do not exist, or arguments that a hook lacks."""
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    _, reason = attempt(lambda: manager.register(module, name))
    if reason is None:
        _, reason = attempt(manager.check_pending)
    return reason


def _call(plugin: _Loaded, hook: str, **arguments: Any) -> tuple[list[Any], str | None]:
    """One hook of one plugin alone: (what it returned, why it failed)."""
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    manager.register(plugin.module, plugin.name)
    results, reason = attempt(lambda: getattr(manager.hook, hook)(**arguments))
    if reason is not None:
        return [], f"{hook} raised {reason}"
    listed, reason = attempt(lambda: [item for result in results or [] for item in result])
    return listed or [], None if reason is None else f"{hook} must return a list: {reason}"


def _backends_of(name: str, module: object, taken: Mapping[str, Backend]) -> tuple[list[Backend], str | None]:
    from portable_dit.backend import API_VERSION, Backend

    found, reason = _call(_Loaded(name, module), "portable_dit_backends")
    for backend in found:
        if reason is not None:
            break
        kind = type(backend).__name__
        if not isinstance(backend, Backend):
            reason = f"{kind} is not a portable_dit.backend.Backend"
        elif getattr(backend, "id", None) is None or getattr(backend, "api_version", None) is None:
            reason = f"{kind} must set id and api_version (now {API_VERSION})"
        elif backend.api_version != API_VERSION:
            reason = (
                f"{kind} was written for api_version {backend.api_version} "
                f"and this portable-dit has {API_VERSION}"
            )
        elif backend.id in taken:
            reason = f"backend id {backend.id!r} is already taken"
    return ([b for b in found if isinstance(b, Backend)] if reason is None else []), reason


def _devices_of(backends: Sequence[Backend]) -> tuple[tuple[str, ...], str | None]:
    names: list[str] = []
    for backend in backends:
        devices, reason = attempt(backend.devices)
        if reason is not None:
            return (), f"devices() of backend {backend.id!r} raised {reason}"
        names += [device.name for device in devices or []]
    return tuple(names), None


def _absence_of(backends: Sequence[Backend]) -> str | None:
    """Why backends without devices have none, as far as they know."""
    asked = (attempt(backend.absence) for backend in backends)
    return "; ".join(why for known, trouble in asked for why in (known, trouble) if why) or None


def _with_additions(
    backends: dict[str, Backend], loaded: Sequence[_Loaded], status: list[PluginStatus]
) -> Plugins:
    """Asks every plugin for its list hooks. One that fails here is shown with the reason and adds nothing."""
    from portable_dit.backend import ExtraKernels

    additions = Additions()
    extra = {id: ExtraKernels() for id in backends}
    for plugin in loaded:
        kernels: dict[str, ExtraKernels] = {}
        more, reason = _more(plugin, additions)
        for id in backends:
            lists = [
                _call(plugin, f"portable_dit_{hook}", backend=id)
                for hook in ("attention_kernels", "linear_kernels", "fused_ops")
            ]
            reason = next((why for _, why in lists if why), reason)
            kernels[id] = ExtraKernels(*(tuple(found) for found, _ in lists))
        if reason is None:
            additions = more
            extra = {id: _joined(extra[id], kernels[id]) for id in backends}
        else:
            status[:] = [replace(s, ok=False, reason=reason) if s.name == plugin.name else s for s in status]
    complete = {id: backend.with_extra(extra[id]) for id, backend in backends.items()}
    usable = {s.name: s.ok for s in status}
    owner = {id: s.name for s in status for id in s.backends}
    return Plugins(
        {id: backend for id, backend in complete.items() if usable[owner[id]]},
        tuple(status),
    )


def _more(plugin: _Loaded, additions: Additions) -> tuple[Additions, str | None]:
    """The additions with those of one plugin, or as they were and why it adds nothing."""
    families, reason = _call(plugin, "portable_dit_model_families")
    reason = reason or _family_problem(families, additions.families)
    places, trouble = _call(plugin, "portable_dit_recipe_folders")
    reason = reason or trouble
    if reason is not None:
        return additions, reason
    folders = tuple(Path(place) for place in places)
    return Additions((*additions.families, *families), (*additions.recipe_folders, *folders)), None


def _family_problem(brought: Sequence[Any], taken: Sequence[Family]) -> str | None:
    """Why a plugin's model families cannot be used, or None."""
    from portable_dit.models.spec import Family

    owners = {model: family.name for family in taken for model in family.models}
    for family in brought:
        if not isinstance(family, Family):
            return f"{type(family).__name__} is not a portable_dit.models.spec.Family"
        for model in family.models:
            if model in owners:
                return f"model {model!r} already belongs to family {owners[model]}"
            owners[model] = family.name
    return None


def _joined(first: Any, second: Any) -> Any:
    return type(first)(
        first.attention + second.attention, first.linear + second.linear, first.fused + second.fused
    )
