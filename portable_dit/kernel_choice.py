"""Which kernel serves each seam and format, and why the others do not.

Pure: kernels answer from data alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from portable_dit.capabilities import (
    Capabilities,
    ExpertRequest,
    Kernel,
    KernelLists,
    LinearRequest,
    ProductKernel,
    Request,
)
from portable_dit.errors import near
from portable_dit.layout import ONE_DEVICE, Layout, sharers, split_attention, split_shape
from portable_dit.models.spec import COMPONENTS, ModelSpec, Numbers, Workload, matches

PLAIN = "plain"  # the body in ops.py
UNKNOWN = "unknown"  # the backend is not installed here, so its kernels cannot be asked
VAE_ROWS = 4096  # rows of a full batch of VAE tiles


@dataclass(frozen=True)
class Refusal:
    """Why a kernel does not serve an op of a component: a code for programs, a sentence for people."""

    component: str
    op: str
    kernel: str
    code: str
    detail: str


@dataclass
class Choices:
    """What was found so far. chosen: component -> op -> kernel id. problems: wishes that no kernel meets.

    quantizing: component -> which of "linear" and "experts" run on a kernel that quantises its input.
    """

    chosen: dict[str, dict[str, str]] = field(default_factory=lambda: {name: {} for name in COMPONENTS})
    quantizing: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in COMPONENTS})
    refusals: list[Refusal] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def pick(
        self,
        component: str,
        op: str,
        kernels: Sequence[Kernel],
        requests: Sequence[Request],
        capabilities: Capabilities,
        *,
        approximate: bool = False,
    ) -> str | None:
        """The first kernel that takes all requests; approximate ones only if allowed. Notes all refusals."""
        first = None
        for kernel in kernels:
            rejects = (kernel.check(request, capabilities) for request in requests)
            reject = next((r for r in rejects if r is not None), None)
            if reject is not None:
                self.refusals.append(Refusal(component, op, kernel.id, reject.code, reject.detail))
            elif not kernel.exact and not approximate:
                why = "quantises inside and so changes the picture; it runs only when the recipe names it"
                self.refusals.append(Refusal(component, op, kernel.id, "approximate", why))
            elif first is None:
                first = kernel.id
        return first


def choose_kernels(
    spec: ModelSpec,
    capabilities: Capabilities,
    kernels: KernelLists | None,
    workload: Workload,
    *,
    numbers: Mapping[str, Numbers],
    attention: str,
    layout: Layout = ONE_DEVICE,
) -> Choices:
    """Kernels for every seam and format.

    kernels: None when the backend is not installed. attention: a wish, or auto. layout: kernels are asked
    about one device's part.
    """
    found = Choices()
    for component in COMPONENTS:
        if kernels is None:
            found.chosen[component]["attention"] = UNKNOWN
            continue
        wish = attention if component == "dit" else "auto"
        dtype = numbers[component].dtype
        requests = [
            split_attention(request, component, layout)
            for name, request in spec.attention_requests(workload, dtype)
            if name == component
        ]
        if requests:  # a token table attends to nothing
            found.chosen[component]["attention"] = _attention(
                found, component, kernels.attention, requests, capabilities, wish=wish
            )
        fusions = spec.fusion_requests(component, dtype)
        for op in dict.fromkeys(request.op for request in fusions):
            alike = [request for request in fusions if request.op == op]
            picked = found.pick(component, op, kernels.fused.get(op, ()), alike, capabilities)
            found.chosen[component][op] = picked or PLAIN
    for component, held in numbers.items():
        if held.format is not None:
            _linear(
                found, spec, capabilities, kernels, workload, component=component, held=held, layout=layout
            )
    return found


def _attention(
    found: Choices,
    component: str,
    kernels: Sequence[Kernel],
    requests: Sequence[Request],
    capabilities: Capabilities,
    *,
    wish: str,
) -> str:
    if wish in ("auto", PLAIN):
        picked = found.pick(component, "attention", kernels, requests, capabilities)
        return PLAIN if wish == PLAIN or picked is None else picked
    named = [kernel for kernel in kernels if kernel.id == wish]
    if not named:
        known = ["auto", PLAIN, *(kernel.id for kernel in kernels)]
        found.problems.append(
            f"attention={wish}: backend {capabilities.device.backend} has no such kernel.{near(wish, known)}"
        )
        return PLAIN
    picked = found.pick(component, "attention", named, requests, capabilities, approximate=True)
    if picked is None:
        why = found.refusals[-1].detail
        found.problems.append(
            f"attention={wish}: this kernel does not serve the {component}: {why}. "
            "Say attention=auto, or name another."
        )
    return picked or PLAIN


def _linear(
    found: Choices,
    spec: ModelSpec,
    capabilities: Capabilities,
    kernels: KernelLists | None,
    workload: Workload,
    *,
    component: str,
    held: Numbers,
    layout: Layout,
) -> None:
    """Kernels for the component's quantised layers and experts, or the problem that there is none."""
    assert held.format is not None
    wish = f"quantization.{component}={held.format}"
    groups = [g for g in spec.linears if g.component == component]
    reached = [g for g in groups if not all(matches(name, held.keep) for name in g.names())]
    if not reached:
        found.problems.append(
            f"{wish}: reaches no layer of the {component}; quantization.keep holds all {len(groups)} kinds. "
            "Narrow keep, or drop the format."
        )
        return
    rows = {"dit": spec.rows(workload), "text_encoder": workload.prompt_tokens, "vae": VAE_ROWS}[component]
    numbers = held.format, held.dtype, rows
    parts = [(g, split_shape(g, spec, layout), bool(sharers(g, spec, layout, held.format))) for g in reached]
    layers = [LinearRequest(*numbers, *shape, divided) for g, shape, divided in parts if not g.experts]
    experts = [
        ExpertRequest(*numbers, g.experts // layout.expert, *shape, divided)
        for g, shape, divided in parts
        if g.experts
    ]
    lists = kernels or KernelLists()
    kinds: tuple[tuple[str, Sequence[Request], Mapping[str, Sequence[ProductKernel]]], ...] = (
        ("linear", layers, lists.linear),
        ("experts", experts, lists.experts),
    )
    for kind, requests, listed in kinds:
        if requests:
            op = f"{kind}:{held.format}"
            if kernels is None:
                found.chosen[component][op] = UNKNOWN
                if quantizes_likely(held, capabilities):
                    found.quantizing[component].append(kind)
            else:
                _linear_kernel(found, capabilities, component, op, requests, listed, wish)


def quantizes_likely(held: Numbers, capabilities: Capabilities) -> bool:
    """Whether inputs are quantised, as far as one can tell without knowing the kernels."""
    format = held.format
    return bool(format and not format.endswith("_weight_only") and capabilities.multiplies(format))


def _linear_kernel(
    found: Choices,
    capabilities: Capabilities,
    component: str,
    op: str,
    requests: Sequence[Request],
    listed: Mapping[str, Sequence[ProductKernel]],
    wish: str,
) -> None:
    kind, _, format = op.partition(":")
    kernels = listed.get(format, ())
    picked = found.pick(component, op, kernels, requests, capabilities, approximate=True)
    if picked is not None:
        found.chosen[component][op] = picked
        if next(kernel for kernel in kernels if kernel.id == picked).quantizes_input:
            found.quantizing[component].append(kind)
        return
    refused = [r for r in found.refusals if r.component == component and r.op == op]
    why = "; ".join(f"{r.kernel}: {r.detail}" for r in refused) or "it has no kernel for that format"
    known = ", ".join(sorted(name for name, some in listed.items() if some)) or "none"
    found.problems.append(
        f"{wish}: backend {capabilities.device.backend} cannot serve it ({why}). Formats it has: {known}."
    )
