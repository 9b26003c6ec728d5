"""Doctor: looks at this machine and says what works, with numbers, what does not, and what to do about it.

    report = examine(recipe="cpu/h3-mini")

Nothing is believed because it imports: every kernel of the selected backend computes the conformance cases
and is compared with float64. Without a recipe only the machine is examined; with one, also whether what it
asks for works.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from packaging.requirements import Requirement

from portable_dit import host
from portable_dit.catalog import load_recipe, named_recipes, read_spec
from portable_dit.errors import UserError
from portable_dit.hooks import ENTRY_POINT_GROUP
from portable_dit.plugins import Plugins, attempt, load_plugins, select_backend
from portable_dit.setup import look_at

if TYPE_CHECKING:
    from portable_dit.backend import Backend
    from portable_dit.capabilities import Capabilities, Device
    from portable_dit.conformance.outcome import Outcome
    from portable_dit.plan import Plan
    from portable_dit.recipe import Recipe

Status = Literal["ok", "warning", "problem"]
GIB = 1 << 30
LITTLE_MEMORY = 2 * GIB  # the built-in model peaks at about 1.2 GB
REPEATS = 5  # runs of a kernel, so that the best of them is neither its first nor one that another held up
PYTHONS = ((3, 10), (3, 13))
DISTRIBUTION = "portable-dit"


@dataclass(frozen=True)
class Check:
    """One finding. problem: something that was asked for cannot work. advice: what to do, empty when ok."""

    name: str
    status: Status
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class Report:
    """All findings, and the worst outcome of every kernel that was probed."""

    checks: tuple[Check, ...]
    probes: tuple[Outcome, ...] = ()
    asked: str | None = None

    @property
    def ok(self) -> bool:
        return all(check.status != "problem" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "asked": self.asked,
            "checks": [asdict(check) for check in self.checks],
            "probes": [probe.as_dict() for probe in self.probes],
        }


@dataclass
class _Findings:
    """Collects as the examination goes on; `examine` freezes it into a Report."""

    checks: list[Check] = field(default_factory=list)
    probes: list[Outcome] = field(default_factory=list)

    def add(self, name: str, status: Status, detail: str, advice: str = "") -> None:
        self.checks.append(Check(name, status, detail, advice))


def examine(recipe: str | None = None, backend: str | None = None) -> Report:
    """Examines the machine, a backend (the recipe's, the named one, or the one to take) and the recipe."""
    found = _Findings()
    _python(found)
    _host(found)
    _requirements(found)
    plugins = load_plugins() if _torch(found) else None
    _recipes(found)
    asked = _read_recipe(found, recipe)
    if plugins:
        _plugins(found, plugins)
        _backend(found, plugins, asked, backend or (asked.device.backend if asked else None))
    return Report(tuple(found.checks), tuple(found.probes), recipe)


def _python(found: _Findings) -> None:
    version = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        found.add("python", "ok", version)
    else:
        lowest, highest = (".".join(map(str, v)) for v in PYTHONS)
        found.add("python", "problem", version, f"Use Python {lowest} to {highest}.")


def _host(found: _Findings) -> None:
    free, total = host.memory()
    limit = host.cgroup_limit()
    where = f", limited by cgroup {limit.path}" if limit and limit.total_bytes == total else ""
    detail = f"{free / GIB:.1f} GiB free of {total / GIB:.1f}{where}"
    if free < LITTLE_MEMORY:
        found.add("memory", "warning", detail, "Close programs, or raise the memory limit of the container.")
    else:
        found.add("memory", "ok", detail)
    quota = host.cpu_quota()
    allowed = f", quota {quota:g}" if quota else ""
    found.add("processor", "ok", f"{host.cpu_name()}, {host.usable_cpus()} logical processors{allowed}")


def _torch(found: _Findings) -> bool:
    def load() -> str:
        import torch

        threads, build = torch.get_num_threads(), torch.__version__
        return f"torch {build}, {threads} threads"

    detail, reason = attempt(load)
    if detail is None:
        found.add(
            "torch",
            "problem",
            f"cannot be imported: {reason}",
            "Reinstall it. If a device extension that torch loads by itself is at fault, uninstall that "
            "extension or set TORCH_DEVICE_BACKEND_AUTOLOAD=0.",
        )
        return False
    threads = int(detail.split()[-2])
    allowed = max(1, round(min(host.cpu_quota() or 1e9, host.usable_cpus())))
    if threads > allowed:
        advice = f"Set OMP_NUM_THREADS={allowed}: more threads than processors wait for each other."
        found.add("torch", "warning", f"{detail} for {allowed} processors", advice)
    else:
        found.add("torch", "ok", detail)
    return True


def _requirements(found: _Findings) -> None:
    """Whether what we and installed plugins require is there, in a version that they accept."""
    points = metadata.entry_points(group=ENTRY_POINT_GROUP)
    plugins = sorted({point.dist.name for point in points if point.dist})
    conflicts = [conflict for name in (DISTRIBUTION, *plugins) for conflict in unmet_requirements(name)]
    if conflicts:
        advice = "Install the versions named here, if need be in a fresh environment."
        found.add("requirements", "problem", "; ".join(conflicts), advice)
    else:
        found.add("requirements", "ok", f"met for {', '.join((DISTRIBUTION, *plugins))}")


def unmet_requirements(distribution: str) -> list[str]:
    """Requirements of an installed distribution (without extras) that are missing or of a wrong version."""
    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []  # run from a checkout that was never installed
    unmet = []
    for requirement in map(Requirement, lines):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            unmet.append(f"{distribution} requires {requirement}, which is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            unmet.append(f"{distribution} requires {requirement}, and {version} is installed")
    return unmet


def _recipes(found: _Findings) -> None:
    names = list(named_recipes())
    if names:
        found.add("recipes", "ok", f"{len(names)} found by name; `portable-dit recipes list` says which")
    else:
        found.add(
            "recipes", "warning", "none found by name", "Reinstall portable-dit, or give recipes by path."
        )


def _read_recipe(found: _Findings, ref: str | None) -> Recipe | None:
    if ref is None:
        return None
    try:
        recipe = load_recipe(ref)
    except UserError as error:
        found.add(
            "recipe", "problem", str(error), "Correct the recipe; `portable-dit recipes schema` says how."
        )
        return None
    found.add("recipe", "ok", f"{ref}: model {recipe.model}, weights {recipe.weights}")
    return recipe


def _plugins(found: _Findings, plugins: Plugins) -> None:
    for status in plugins.status:
        name = f"plugin {status.name}"
        if not status.ok:
            advice = "Repair, upgrade or uninstall it; it is skipped until then."
            found.add(name, "warning", f"{status.origin}: {status.reason}", advice)
        elif status.devices or not status.backends:
            found.add(name, "ok", f"{status.origin}: {', '.join(status.devices) or 'no backend of its own'}")
        else:
            advice = "Check the driver, and which devices the environment makes visible."
            why = f": {status.reason}" if status.reason else ""
            found.add(name, "warning", f"{status.origin}: finds no device{why}", advice)


def _backend(found: _Findings, plugins: Plugins, recipe: Recipe | None, wanted: str | None) -> None:
    """Probes the kernels of the backend that is meant and, with a recipe, makes its plan."""
    try:
        backend = select_backend(wanted, plugins)
    except UserError as error:
        found.add("backend", "problem", str(error))
        return

    def facts() -> tuple[Device, Capabilities]:
        device = backend.devices()[0]
        backend.activate(device)
        return device, look_at(backend, device, recipe) if recipe else backend.capabilities(device)

    known, reason = attempt(facts)
    if known is None:
        advice = "The device is there but does not work: check its driver, or name another backend."
        found.add("backend", "problem", f"{backend.id}: {reason}", advice)
        return
    device, capabilities = known
    native = f"; native formats {', '.join(sorted(capabilities.native_formats)) or 'none'}"
    dtypes = ", ".join(sorted(capabilities.dtypes))
    found.add("backend", "ok", f"{backend.id}: {device.name} ({device.arch}); {dtypes}{native}")
    plan = _plan(found, recipe, backend, capabilities) if recipe else None
    found.probes += probe_kernels(backend, device, capabilities)
    _judge_probes(found, plan)


def probe_kernels(backend: Backend, device: Device, capabilities: Capabilities) -> list[Outcome]:
    """The worst outcome of each kernel in each dtype of the device, by the conformance cases."""
    import torch

    from portable_dit.conformance.outcome import worst

    with torch.inference_mode():
        groups = [
            outcomes
            for dtype in sorted(capabilities.dtypes & {"float32", "bfloat16", "float16"})
            for outcomes in _outcomes(backend, device, capabilities, dtype)
        ]
    return [worst(outcomes) for outcomes in groups if outcomes]


def _outcomes(
    backend: Backend, device: Device, capabilities: Capabilities, dtype: str
) -> Iterator[Sequence[Outcome]]:
    from portable_dit.backend import AttentionKernel, FusedOp, LinearKernel
    from portable_dit.conformance.attention import check_attention
    from portable_dit.conformance.fused import check_fused
    from portable_dit.conformance.linear import check_linear

    lists = backend.kernel_lists()
    for kernel in lists.attention:
        assert isinstance(kernel, AttentionKernel)
        yield check_attention(kernel, backend, device, capabilities, dtype, repeats=REPEATS)
    for kernel in (k for kernels in lists.linear.values() for k in kernels):
        assert isinstance(kernel, LinearKernel)
        yield check_linear(kernel, backend, device, capabilities, dtype, repeats=REPEATS)
    for kernel in (k for kernels in lists.fused.values() for k in kernels):
        assert isinstance(kernel, FusedOp)
        yield check_fused(kernel, backend, device, capabilities, dtype, repeats=REPEATS)


def _plan(found: _Findings, recipe: Recipe, backend: Backend, capabilities: Capabilities) -> Plan | None:
    from portable_dit.plan import make_plan

    try:
        plan = make_plan(recipe, read_spec(recipe), capabilities, backend.kernel_lists())
    except UserError as error:
        found.add("plan", "problem", str(error), "`portable-dit plan` shows every choice and its reason.")
        return None
    found.add("plan", "ok" if plan.fits else "problem", plan.verdict)
    for note in plan.notes:
        found.add("plan", "warning" if note.changed else "ok", note.text)
    return plan


def _judge_probes(found: _Findings, plan: Plan | None) -> None:
    """A wrong kernel is a problem when the plan uses it, or when no plan says that it will not be used."""
    failed = [probe for probe in found.probes if probe.status == "fail"]
    passed = sum(probe.status == "pass" for probe in found.probes)
    used = None if plan is None else {pair for ids in plan.kernels.values() for pair in ids.items()}
    for probe in failed:
        matters = used is None or (probe.op, probe.kernel) in used
        found.add(
            f"kernel {probe.op} {probe.kernel}",
            "problem" if matters else "warning",
            f"{probe.dtype}, case {probe.case}: {probe.detail}",
            "Do not use it: name another kernel in the recipe, and report this to who wrote it.",
        )
    if not failed:
        found.add(
            "kernels",
            "ok",
            f"{passed} kernels and dtypes right: none is off by more than twice what plain torch is",
        )
