"""What the rest of the engine may know of a model, as torch-free data, and the shape of a loaded model.

A family (one folder beside this file) turns a checkpoint's configs into a `ModelSpec` without torch, and into a
`Model` with it. Plans read the spec; the engine drives the model; neither knows the family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from portable_dit.capabilities import AttentionRequest, FusionRequest

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

COMPONENTS = ("text_encoder", "dit", "vae")


@dataclass(frozen=True)
class SizeRules:
    """Which canvases a model draws. Sides in pixels; max_ratio is the longer side over the shorter."""

    multiple: int
    min_side: int
    max_side: int
    max_pixels: int
    max_ratio: float
    default: tuple[int, int]  # width, height


@dataclass(frozen=True)
class LinearGroup:
    """Linear layers of one shape: `pattern` is a glob over module names inside the component."""

    component: str
    pattern: str
    count: int
    in_features: int
    out_features: int


@dataclass(frozen=True)
class Workload:
    """One request as the plan sees it. reference_sizes: (width, height) after the model's own rule."""

    width: int
    height: int
    prompt_tokens: int
    reference_sizes: tuple[tuple[int, int], ...] = ()
    images: int = 1


@dataclass(frozen=True)
class Bytes:
    """Weights and activations of one component on one device; `parts` explains the sum, name -> bytes."""

    weights: int
    activations: int
    parts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Numbers:
    """How one component is held: activation dtype, and the format of its quantisable linears (None = dtype)."""

    dtype: str = "bfloat16"
    format: str | None = None


class ModelSpec(Protocol):
    """Everything a plan needs of a model. Implementations are frozen dataclasses in `models/<family>/spec.py`."""

    id: str
    family: str
    sizes: SizeRules
    steps: tuple[int, ...]  # allowed step counts, the first is the default; empty = any
    has_guidance: bool
    default_guidance: float | None
    max_references: int
    max_prompt_characters: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    ffn_size: int
    num_experts: int
    keep: tuple[str, ...]  # globs of linears that are never quantised unless a recipe says so
    supported_layouts: tuple[str, ...]  # keys of recipe.layout that may exceed 1
    notes: tuple[str, ...]  # defaults that were used because the checkpoint does not say
    linears: tuple[LinearGroup, ...]

    def rows(self, workload: Workload) -> int:
        """Packed sequence length of one denoise step."""
        ...

    def attention_requests(self, workload: Workload, dtype: str) -> Sequence[tuple[str, AttentionRequest]]:
        """The distinct attention calls, by component name."""
        ...

    def fusion_requests(self, dtype: str) -> Sequence[FusionRequest]:
        """The fused seams that the DiT has."""
        ...

    def bytes_on_device(self, component: str, workload: Workload, numbers: Numbers) -> Bytes:
        """Unsplit bytes of a component for one request; layouts divide them in the plan."""
        ...

    def reference_size(self, width: int, height: int) -> tuple[int, int]:
        """The size a reference of the given pixels is brought to before it is encoded."""
        ...


@dataclass(frozen=True)
class Schedule:
    """sigmas: float32 noise levels, one more than steps, 1 -> 0. times: what the model is fed at each step."""

    sigmas: tuple[float, ...]
    times: tuple[float, ...]

    @property
    def steps(self) -> int:
        return len(self.times)


class Denoiser(Protocol):
    """A DiT bound to one request, in the three parts that outside concerns hook into.

    State is whatever the family carries from embed to head; blocks take and return the hidden rows [B, S, C].
    """

    @property
    def blocks(self) -> Sequence[Callable[..., Tensor]]: ...

    def embed(self, latents: Tensor, step: int) -> tuple[Tensor, tuple[Any, ...]]:
        """Hidden rows [B, S, C] and the further arguments of every block."""
        ...

    def head(self, hidden: Tensor, step: int) -> Tensor:
        """Velocity in the shape and float32 dtype of the latents."""
        ...


class Model(Protocol):
    """A loaded model: components as modules, and the stages of a request as functions of values."""

    spec: ModelSpec

    def component(self, name: str) -> nn.Module:
        """The module of "text_encoder", "dit" or "vae"."""
        ...

    def finish_loading(self, schedule: Schedule) -> None:
        """Work that needs the weights once: fixed modulation tables, whose weights are then dropped."""
        ...

    def schedule(self, steps: int) -> Schedule: ...

    def encode_prompt(self, prompt: str, references: Sequence[np.ndarray]) -> Any:
        """Text states and what else the text encoder gives. references: uint8 RGB [H, W, 3], already sized."""
        ...

    def prepare(
        self, prompt: Any, references: Sequence[np.ndarray], width: int, height: int, schedule: Schedule, seed: int
    ) -> Denoiser:
        """References encoded to latents, rows packed, positions and modulation indices laid out."""
        ...

    def latent_shape(self, width: int, height: int) -> tuple[int, ...]:
        """Shape of one image's latents without batch: (C, h, w)."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Latents [1, C, h, w] float32 -> pixels uint8 [H, W, 3] on the device."""
        ...

    def preview(self, latents: Tensor) -> Tensor:
        """A cheap small picture of half-denoised latents: uint8 [h, w, 3]."""
        ...
