"""Footprint: how many bytes a plan takes on the device and on the host, stage by stage.

A request passes the text encoder, the DiT and the VAE one after the other, so the peak is the hungriest
stage: what rests on the device then, plus that stage's own activations. Loading is a stage too, because some
weights (those of the modulation) exist only until tables were made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from portable_dit.capabilities import Capabilities
from portable_dit.layout import ONE_DEVICE, Layout
from portable_dit.models.spec import COMPONENTS, DTYPE_BYTES, Bytes, ModelSpec, Numbers, Workload

# A process before its model: Python, torch and this package (260 MiB resident after one small call of each
# kind of op, torch 2.13, CPU wheel, x86-64 Linux), plus 20 MiB for a tokenizer and what the allocator keeps
# from loading. Calibrated with h3-mini at 512x512: 517 MiB measured in bfloat16 and 526 in float32, against
# 478 and 510 predicted.
HOST_RUNTIME_BYTES = 280 * 2**20
# Layerwise offload keeps the block that runs and the one that is on its way.
STAGING_BLOCKS = 2
# Allocators round up and leave gaps; a plan that needs more than this share of the memory is said not to fit.
USABLE_SHARE = 0.97
# Captured calls hold what is left, but no more than this share of the memory: a server of many sizes would
# else grow until nothing is left for programs beside it.
GRAPH_SHARE = 0.25


@dataclass(frozen=True)
class Offload:
    """Where the weights of each component rest: none (on the device), component or layerwise."""

    dit: str = "none"
    text_encoder: str = "none"
    vae: str = "none"
    resident_blocks: int = 0

    def of(self, component: str) -> str:
        return {"dit": self.dit, "text_encoder": self.text_encoder, "vae": self.vae}[component]


@dataclass(frozen=True)
class Footprint:
    """components: the part of each that one device holds. stages: bytes on one device in "load" and in each
    component's stage.

    peak: the highest stage. graphs: what captured calls may hold beside it. host: bytes of all processes on
    the host, `pinned` of them page-locked. The limits are what the machine has; a host limit of 0 is unknown.
    in_use: bytes by which the device's limit is lower, since they are in use already. Where device and host
    share memory, host is the peak of all processes together.
    """

    components: Mapping[str, Bytes]
    stages: Mapping[str, int]
    peak: int
    host: int
    pinned: int
    device_limit: int
    host_limit: int
    shared: bool
    graphs: int = 0
    in_use: int = 0

    @property
    def peak_stage(self) -> str:
        return max(self.stages, key=lambda stage: self.stages[stage])

    @property
    def fits_device(self) -> bool:
        return self.peak + self.graphs <= USABLE_SHARE * self.device_limit

    @property
    def left(self) -> int:
        """Bytes of the device that are free at the peak, before graphs."""
        return max(int(USABLE_SHARE * self.device_limit) - self.peak, 0)

    @property
    def fits_host(self) -> bool:
        limit = self.device_limit if self.shared else self.host_limit
        return not limit or self.host <= USABLE_SHARE * limit

    @property
    def fits(self) -> bool:
        return self.fits_device and self.fits_host


def measure_footprint(
    spec: ModelSpec,
    capabilities: Capabilities,
    workload: Workload,
    *,
    numbers: Mapping[str, Numbers],
    offload: Offload,
    layout: Layout = ONE_DEVICE,
    device_limit: int = 0,
    extra_activations: Mapping[str, int] | None = None,
    graphs: int = 0,
) -> Footprint:
    """The footprint of one request.

    layout: how components are split; its devices are alike. device_limit: bytes to plan with, 0 takes what is
    unused of a device. extra_activations: by component, for kernels that need more than the model itself.
    graphs: bytes that are set aside for captured calls.
    """
    extra = extra_activations or {}
    shared = capabilities.host_shares_memory
    whole = {name: spec.bytes_on_device(name, workload, numbers[name]) for name in COMPONENTS}
    whole["dit"] = replace(whole["dit"], activations=workload.batch * whole["dit"].activations)
    extra = {name: size * workload.batch if name == "dit" else size for name, size in extra.items()}
    components = _split(whole, spec, workload, numbers, layout)
    heads_split = {"dit": layout.tensor * layout.ulysses, "text_encoder": layout.text_encoder_tensor}
    extra = {name: -(-size // heads_split.get(name, 1)) for name, size in extra.items()}
    runtime = HOST_RUNTIME_BYTES if shared else capabilities.runtime_bytes
    pictures = 3 * workload.width * workload.height * max(workload.images, workload.batch)
    stages = {"load": runtime + sum(_loading(components[n], n, offload, shared=shared) for n in COMPONENTS)}
    for stage in COMPONENTS:
        held = sum(resting(name, components[name], offload, stage=stage) for name in COMPONENTS)
        stages[stage] = runtime + held + components[stage].activations + extra.get(stage, 0)
    away = sum(_away(name, components[name], offload) for name in COMPONENTS)
    loading = sum(components[name].loading for name in COMPONENTS)
    if shared:  # the plan moves nothing then, so `away` is 0
        stages = {stage: size + pictures for stage, size in stages.items()}
    peak = max(stages.values())
    limit = device_limit or capabilities.unused_bytes
    return Footprint(
        components=components,
        stages=stages,
        peak=peak,
        host=layout.world * peak
        if shared
        else layout.world * (HOST_RUNTIME_BYTES + away + loading) + layout.data * pictures,
        pinned=layout.world * away if capabilities.pinned_memory and not shared else 0,
        device_limit=limit,
        host_limit=capabilities.host_bytes,
        shared=shared,
        graphs=graphs,
        in_use=capabilities.used_bytes if limit == capabilities.unused_bytes else 0,
    )


def _split(
    whole: Mapping[str, Bytes],
    spec: ModelSpec,
    workload: Workload,
    numbers: Mapping[str, Numbers],
    layout: Layout,
) -> dict[str, Bytes]:
    """What one device holds of each component.

    Tensor parallel divides the weights of blocks and leaves rows whole. Sequence parallel divides the rows,
    holds all weights, and has what it sends beside what it receives while heads are exchanged. Tiles on more
    devices save time but no memory, since one of them puts the picture together.
    """
    dit = _with_split_blocks(whole["dit"], layout.tensor)
    sequence = layout.ulysses * layout.ring
    if sequence > 1:
        rows = -(-spec.rows(workload) // sequence) * workload.batch
        inner = spec.num_heads * spec.head_dim // layout.tensor
        exchanged = 4 * rows * inner * DTYPE_BYTES[numbers["dit"].dtype]  # queries, keys, values, result
        dit = replace(dit, activations=-(-dit.activations // sequence) + exchanged)
    text = _with_split_blocks(whole["text_encoder"], layout.text_encoder_tensor)
    return {**whole, "dit": dit, "text_encoder": text}


def _with_split_blocks(size: Bytes, degree: int) -> Bytes:
    block = -(-size.block // degree)
    return replace(size, weights=size.weights - (size.block - block) * size.num_blocks, block=block)


def _resident_blocks(name: str, size: Bytes, offload: Offload) -> int:
    return min(offload.resident_blocks if name == "dit" else 0, size.num_blocks)


def resting(name: str, size: Bytes, offload: Offload, *, stage: str) -> int:
    """Bytes of a component's weights that lie on the device during a stage, which has a component's name."""
    placement = offload.of(name)
    if placement == "none":
        return size.weights
    if placement == "component":
        return size.weights if name == stage else 0
    staging = STAGING_BLOCKS if name == stage else 0
    blocks = min(_resident_blocks(name, size, offload) + staging, size.num_blocks)
    return size.weights - size.block * (size.num_blocks - blocks)


def _loading(size: Bytes, name: str, offload: Offload, *, shared: bool) -> int:
    """Bytes of a component on the device just before its loading ends.

    What is dropped then waits on the host, and visits block by block.
    """
    visiting = size.loading if shared else -(-size.loading // max(size.num_blocks, 1))
    return resting(name, size, offload, stage="load") + visiting


def _away(name: str, size: Bytes, offload: Offload) -> int:
    """Weights of a component that rest on the host."""
    placement = offload.of(name)
    if placement == "none":
        return 0
    if placement == "component":
        return size.weights
    return size.block * (size.num_blocks - _resident_blocks(name, size, offload))
