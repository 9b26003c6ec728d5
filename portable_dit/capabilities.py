"""What a machine can do, as data. Torch-free, so that plans can be made for machines we do not own.

A backend fills `Capabilities` by probing its device; `tests/data/machines/*.json` hold recorded ones. Kernels
answer `check(request, capabilities)` from this data alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

STRICT = {"extra": "forbid"}  # read by pydantic: a machine file with an unknown key is refused


@dataclass(frozen=True)
class Device:
    """One accelerator, or the CPU. `torch_device` is what torch calls it; `arch` is the vendor's own name."""

    __pydantic_config__: ClassVar[dict[str, str]] = STRICT
    backend: str
    index: int
    torch_device: str
    name: str
    arch: str
    total_bytes: int
    driver: str | None = None


@dataclass(frozen=True)
class GraphLimits:
    """What captured graphs may hold on this device."""

    __pydantic_config__: ClassVar[dict[str, str]] = STRICT
    supported: bool = False
    side_streams: bool = False
    collectives: bool = False
    concurrent_replay: bool = False
    max_live: int | None = None
    failure_is_fatal: bool = False
    default_on: bool = False


@dataclass(frozen=True)
class CollectiveLimits:
    """The torch.distributed backend of this device and what it can do."""

    __pydantic_config__: ClassVar[dict[str, str]] = STRICT
    backend: str
    passes_device_id: bool = True
    all_to_all: bool = True
    point_to_point: bool = True


@dataclass(frozen=True)
class Capabilities:
    """What one device of a machine can do.

    dtypes, formats: names as in recipes ("bfloat16", "fp8_row"). `native_formats` run on the matrix units;
    the other ones are dequantised first. libraries: version of each optional kernel library that passed its
    probe. compute: dense TFLOP/s by dtype or format, and `memory_bandwidth` and `link_bandwidth` (one
    direction, to another device of the host) in bytes per second, for predictions; empty when unknown.
    runtime_bytes: what the driver and its libraries take on the device before the first tensor. used_bytes:
    what is in use on the device already, by other programs or other models; 0 where nobody has looked.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = STRICT
    device: Device
    count: int
    dtypes: frozenset[str]
    native_formats: frozenset[str] = frozenset()
    float64: bool = True
    pinned_memory: bool = False
    async_copy: bool = False
    host_shares_memory: bool = False
    graphs: GraphLimits = GraphLimits()
    collectives: CollectiveLimits = CollectiveLimits("gloo")
    libraries: Mapping[str, str] = field(default_factory=dict)
    compute: Mapping[str, float] = field(default_factory=dict)
    memory_bandwidth: float | None = None
    link_bandwidth: float | None = None
    host_bytes: int = 0
    runtime_bytes: int = 0
    used_bytes: int = 0

    @property
    def unused_bytes(self) -> int:
        """Bytes of the device that a plan may count with."""
        return self.device.total_bytes - self.used_bytes

    def multiplies(self, format: str) -> bool:
        """Whether matrix units take it; a rotated format is multiplied as the plain one is."""
        return format.removesuffix("_rotated") in self.native_formats


@dataclass(frozen=True)
class Reject:
    """Why a kernel, format or layout cannot serve: a short code for programs, a sentence for people."""

    code: str
    detail: str


@dataclass(frozen=True)
class AttentionRequest:
    """One attention call as the plan sees it: [B, S, N, D] tensors; `mask` is a kind from `masks.py`."""

    dtype: str
    head_dim: int
    num_heads: int
    num_kv_heads: int
    rows: int
    mask: str = "none"
    return_lse: bool = False


@dataclass(frozen=True)
class LinearRequest:
    """One linear layer as the plan sees it: [rows, in_features] times [out_features, in_features].

    divided: the input is a part of one that several devices hold, and the format has scales that span parts.
    """

    format: str
    dtype: str
    rows: int
    in_features: int
    out_features: int
    divided: bool = False


@dataclass(frozen=True)
class ExpertRequest:
    """The linear layers of a mixture's experts as the plan sees them: [rows, in_features], ordered by expert,
    times weights [experts, out_features, in_features]. divided: as in `LinearRequest`.
    """

    format: str
    dtype: str
    rows: int
    experts: int
    in_features: int
    out_features: int
    divided: bool = False


@dataclass(frozen=True)
class FusionRequest:
    """One fused seam as the plan sees it; `op` is a seam name of `ops.py`."""

    op: str
    dtype: str
    channels: int


Request = AttentionRequest | LinearRequest | ExpertRequest | FusionRequest


class Kernel(Protocol):
    """What plan-making needs to know of a kernel; `backend.py` adds how to run it.

    exact: False when the kernel quantises inside and so changes numbers; such a kernel is used only by name.
    """

    @property
    def id(self) -> str: ...

    @property
    def exact(self) -> bool: ...

    def check(self, request: Request, capabilities: Capabilities) -> Reject | None:
        """None when the kernel serves the request on such a device, else the reason. Pure."""
        ...


class ProductKernel(Kernel, Protocol):
    """A kernel of linear layers or experts. quantizes_input: it computes with inputs in the format too."""

    @property
    def quantizes_input(self) -> bool: ...


@dataclass(frozen=True)
class KernelLists:
    """All kernels of a backend and its plugins, best first; those of linear layers and experts by format."""

    attention: Sequence[Kernel] = ()
    linear: Mapping[str, Sequence[ProductKernel]] = field(default_factory=dict)
    experts: Mapping[str, Sequence[ProductKernel]] = field(default_factory=dict)
    fused: Mapping[str, Sequence[Kernel]] = field(default_factory=dict)
