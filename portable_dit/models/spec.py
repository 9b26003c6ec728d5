"""What the rest of the engine may know of a model, as torch-free data, and the shape of a loaded model.

A family (one folder beside this file) turns a checkpoint's configs into a `ModelSpec` without torch, and into
a `Model` with it. Plans read the spec; the engine drives the model; neither knows the family.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from portable_dit.capabilities import AttentionRequest, FusionRequest
from portable_dit.models.sizes import SizeRules

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn

COMPONENTS = ("text_encoder", "dit", "vae")
# Tiles that a VAE takes at once where memory allows. A host's caches hold few (on two cores 16 at once are 5
# to 25 % faster than 112), a device wants many rows (4096 x 4096 on one H200: 240 ms by 16, 217 by 112).
TILE_BATCH, DEVICE_TILE_BATCH = 16, 112
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Quantised formats hold one byte per weight. Here: bytes of one scale, and the block of rows and columns that
# shares it, 0 = the whole side.
FORMAT_SCALES = {
    "fp8_row": (4, 1, 0),
    "fp8_tensor": (4, 0, 0),
    "fp8_block128": (4, 128, 128),
    "fp8_weight_only": (4, 1, 0),
    "mxfp8": (1, 1, 32),
    "int8_row": (4, 1, 0),
    "int8_row_rotated": (4, 1, 0),
    "int8_weight_only": (4, 1, 0),
}


ROTATED_TOGETHER = 256  # channels of a rotated format; more spreads further and costs more


def rotated_together(channels: int) -> int:
    """How many neighbours of so many channels: the largest power of four up to 256 that divides them."""
    size = 1
    while size < ROTATED_TOGETHER and channels % (4 * size) == 0:
        size *= 4
    return size


def input_spans(format: str) -> tuple[bool, bool]:
    """Whether a scale of a quantised input spans all rows, and all columns: as one of the weight does."""
    _, rows, columns = FORMAT_SCALES[format]
    return rows == 0, columns == 0


def linear_bytes(format: str, out_features: int, in_features: int) -> int:
    """Bytes of one weight [out_features, in_features] in a dtype or in a quantised format with its scales."""
    if format in DTYPE_BYTES:
        return out_features * in_features * DTYPE_BYTES[format]
    size, rows, columns = FORMAT_SCALES[format]
    blocks = -(-out_features // (rows or out_features)) * -(-in_features // (columns or in_features))
    return out_features * in_features + size * blocks


def matches(name: str, globs: Sequence[str]) -> bool:
    """Whether a layer's name, or that of a module around it, matches a glob: "a.b" matches "a.b.c.0"."""
    parts = name.split(".")
    paths = [".".join(parts[: end + 1]) for end in range(len(parts))]
    return any(fnmatchcase(path, glob) for glob in globs for path in paths)


@dataclass(frozen=True)
class LinearGroup:
    """Linear layers of one shape that a format may be put on.

    pattern: their module names inside the component, with `*` where the numbers 0 .. count - 1 stand.
    experts: how many layers of that shape each module holds, as experts of one mixture; 0 = it is a layer.
    """

    component: str
    pattern: str
    count: int
    in_features: int
    out_features: int
    experts: int = 0

    def names(self) -> tuple[str, ...]:
        """The module names, one per layer."""
        return tuple(self.pattern.replace("*", str(i)) for i in range(self.count))


@dataclass(frozen=True)
class TensorSplit:
    """How tensor parallel divides the weights [N, K] of some layers.

    pattern: as in `LinearGroup`. along: "out" gives each device a share of the out features, "in" a share of
    the in features, whose results are summed over the devices. parts: out features of what is fused in the
    layer (queries, keys and values; the halves of a gate), each of which is divided on its own; empty = one.
    experts: the layers of that many experts, each divided alike. sum_at: the module whose result is summed in
    place of the layer's own, since it adds up several such results; empty = the layer.
    """

    component: str
    pattern: str
    along: Literal["out", "in"]
    parts: tuple[int, ...] = ()
    experts: int = 0
    sum_at: str = ""


@dataclass(frozen=True)
class Workload:
    """One request as the plan sees it.

    reference_sizes: (width, height) after the model's own rule. tile_batch: most tiles that the VAE takes at
    once, 0 = the picture whole; batch: most pictures that the DiT takes at once. A plan lowers both where
    they would not fit.
    """

    width: int
    height: int
    prompt_tokens: int
    reference_sizes: tuple[tuple[int, int], ...] = ()
    images: int = 1
    tile_batch: int = TILE_BATCH
    batch: int = 1


@dataclass(frozen=True)
class Bytes:
    """Weights and activations of one component on one device; `parts` explains the weights, name -> bytes.

    loading: on top of weights and on the host, only until loading is done (modulation weights before they
    become tables, block by block on the device).
    block: weights of one of `num_blocks` equal blocks, which layerwise offload moves.
    """

    weights: int
    activations: int
    parts: Mapping[str, int] = field(default_factory=dict)
    loading: int = 0
    block: int = 0
    num_blocks: int = 0


@dataclass(frozen=True)
class Numbers:
    """How one component is held: activation dtype, and the format of its linears that are not in `keep`."""

    dtype: str = "bfloat16"
    format: str | None = None
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ABC):
    """Everything a plan needs of a model. Families derive from it in `models/<family>/spec.py`."""

    id: str
    family: str
    sizes: SizeRules
    steps: tuple[int, ...]  # allowed step counts, the first is the default; empty = any
    has_guidance: bool
    default_guidance: float | None
    max_references: int
    max_reference_ratio: float  # the longer side over the shorter
    max_prompt_characters: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    hidden_size: int
    latent_channels: int
    latent_ratio: int  # pixels along each side of a latent cell
    experts_per_row: int = 0  # that the router chooses
    ffn_size: int
    num_experts: int
    keep: tuple[str, ...]  # globs of linears that stay unquantised unless a recipe has a list of its own
    supported_layouts: tuple[str, ...]  # keys of recipe.layout that may exceed 1
    dtypes: tuple[str, ...]  # activation types that give right pictures
    float32_components: tuple[str, ...]  # held in float32 whatever the precision
    prompt_tokens: int  # what a plan assumes of a prompt
    notes: tuple[str, ...]  # defaults that were used because the checkpoint does not say
    linears: tuple[LinearGroup, ...]  # all that a format may be put on; no other layer is ever quantised
    requires: Mapping[str, str] = field(default_factory=dict)  # module it runs on -> what to type to get it
    # Seams of the DiT whose result one linear layer alone reads, and that layer; `*` is the block's number.
    producers: tuple[tuple[str, str], ...] = ()
    # Globs of DiT weights that finish_loading makes tables of and drops; they wait on the host until then.
    temporary: tuple[str, ...] = ()
    tensor_plan: tuple[
        TensorSplit, ...
    ] = ()  # layers that tensor parallel divides; others are whole everywhere
    num_text_heads: int = 0  # heads of the text encoder that tensor parallel divides; key heads where fewer
    text_ffn_size: int = 0
    tiling: Literal["always", "optional"] = "always"  # whether the VAE's pictures are put together of tiles
    guidance_branches: int = 1  # conditions that a guided request evaluates: with a prompt, and without
    default_steps: int = 50  # of a request that does not say, where any count is allowed
    system_prompts: Mapping[str, str] | None = (
        None  # by name, as the checkpoint brings them; None = takes none
    )
    streamed: tuple[str, ...] = ("dit", "text_encoder")  # components whose equal blocks offload can stream
    # Activation types that a component wants instead of the recipe's, best first; float32 if none is there.
    own_dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def latent_values(self, width: int, height: int) -> int:
        """How many numbers the latents of one picture have."""
        return self.latent_channels * (width // self.latent_ratio) * (height // self.latent_ratio)

    def decode_flops(self, width: int, height: int) -> float:
        """Operations of the VAE's decoder for one picture, for predictions; 0 where nobody counted them."""
        return 0.0

    def branches(self, scale: float | None) -> int:
        """Conditions that a request with such a guidance scale evaluates at each step."""
        return self.guidance_branches if scale is not None and scale > 1 else 1

    @abstractmethod
    def rows(self, workload: Workload) -> int:
        """Packed sequence length of one denoise step."""

    @abstractmethod
    def attention_requests(self, workload: Workload, dtype: str) -> Sequence[tuple[str, AttentionRequest]]:
        """The distinct attention calls, by component name."""

    @abstractmethod
    def fusion_requests(self, component: str, dtype: str) -> Sequence[FusionRequest]:
        """The fused seams that a component has, which computes in dtype."""

    @abstractmethod
    def bytes_on_device(self, component: str, workload: Workload, numbers: Numbers) -> Bytes:
        """Unsplit bytes of a component for one request; layouts divide them in the plan."""

    @abstractmethod
    def reference_size(self, width: int, height: int, *, canvas: tuple[int, int]) -> tuple[int, int]:
        """The size a reference of the given pixels is brought to before it is encoded.

        canvas: width and height of the picture that is drawn.
        """

    @abstractmethod
    def edit_size(self, width: int, height: int) -> tuple[int, int]:
        """The canvas that an edit of such a reference wants when nobody says a size; may be illegal."""

    def prompt_problem(self, prompt: str, reference_sizes: Sequence[tuple[int, int]]) -> str | None:
        """Why the text encoder cannot take this prompt with these references, told before anything is loaded.

        reference_sizes: (width, height) after the model's own rule. None: it can, or only the encoder knows,
        which then raises RequestError itself. Raises WeightsError when its tokenizer cannot be read.
        """
        return None


@dataclass(frozen=True)
class Schedule:
    """sigmas: float32 noise levels, one more than steps, 1 -> 0. times: what the model is fed at each."""

    sigmas: tuple[float, ...]
    times: tuple[float, ...]

    @property
    def steps(self) -> int:
        return len(self.times)


class Denoiser(Protocol):
    """A DiT bound to one request, in the three parts that outside concerns hook into."""

    @property
    def blocks(self) -> Sequence[Callable[..., Tensor]]:
        """Take and return the hidden rows [B, S, C]. They hold weights and fixed tables alone: what belongs
        to the request comes as arguments, so that one captured graph serves all requests of a size.
        """
        ...

    def embed(self, latents: Tensor, step: int) -> tuple[Tensor, tuple[Any, ...]]:
        """Hidden rows [B, S, C] and the further arguments of every block: tensors, tuples, dataclasses."""
        ...

    def part(self, arguments: tuple[Any, ...], lengths: tuple[int, ...], index: int) -> tuple[Any, ...]:
        """The blocks' arguments for one part of the rows, when parts of these lengths share them.

        What belongs to a row is cut; the mask becomes a `masks.Part` of the whole one.
        """
        ...

    def join(self, arguments: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """The blocks' arguments for the rows of several pictures side by side in the batch.

        arguments: those of each picture, all of the same shapes and masks.
        """
        ...

    def head(self, hidden: Tensor, step: int) -> Tensor:
        """Velocity towards the data, float32, in the shape of the latents, for each branch: [B, C, h, w]."""
        ...


# Takes a network, tiles [count, ...] and how many of them to run at once at most: `tiles.run_tiles`, or what
# replays graphs or spreads the tiles over devices in its place.
TileRunner = Callable[[Callable[["Tensor"], "Tensor"], "Tensor", int], "Tensor"]


def batch_size(count: int, most: int) -> int:
    """How many of `count` tiles to take at once, at most `most`, so that batches of one size waste the least.

    Small batches keep a device idle, so no size below half of `most` is tried.
    """
    if count <= most:
        return count
    sizes = range(most, max(most // 2, 1) - 1, -1)
    return min(sizes, key=lambda size: math.ceil(count / size) * size)


class Model(Protocol):
    """A loaded model: components as modules, and the stages of a request as functions of values."""

    @property
    def spec(self) -> ModelSpec: ...

    def component(self, name: str) -> nn.Module:
        """The module of "text_encoder", "dit" or "vae"."""
        ...

    def blocks_name(self, component: str) -> str:
        """Where the equal blocks of "text_encoder" or "dit" are in it: the name of an nn.ModuleList."""
        ...

    def finish_loading(self, schedule: Schedule, device: str | None = None) -> None:
        """Work that needs the weights once: fixed modulation tables, whose weights are then dropped.

        device: where to compute, None = where the weights are. That weights wait on the host must not change
        a picture's numbers.
        """
        ...

    def schedule(self, steps: int) -> Schedule: ...

    def encode_prompt(
        self, prompt: str, references: Sequence[np.ndarray], system_prompt: str | None = None
    ) -> Any:
        """Text states and what else the encoder gives, as tensors, tuples and dataclasses.

        A copy of it on the host must do as well. references: uint8 RGB [H, W, 3], already sized.
        system_prompt: only for models whose spec has `system_prompts`.
        """
        ...

    def prepare(
        self,
        prompt: Any,
        references: Sequence[np.ndarray],
        width: int,
        height: int,
        schedule: Schedule,
        seed: int,
        *,
        tile_batch: int = TILE_BATCH,
        guidance: float | None = None,
        branches: tuple[int, ...] = (0,),
    ) -> Denoiser:
        """References encoded to latents, rows packed, positions and modulation indices laid out.

        guidance: the request's scale, for models that are told it. branches: the conditions that it evaluates
        at each step, 0 with the prompt and 1 without.
        """
        ...

    def latent_shape(self, width: int, height: int) -> tuple[int, ...]:
        """Shape of one image's latents without batch: (C, h, w)."""
        ...

    def noise(self, width: int, height: int, references: Sequence[np.ndarray], seed: int) -> Tensor:
        """What one image starts from: float32 [1, C, h, w], drawn on the host from the seed."""
        ...

    def decode(self, latents: Tensor, *, run: TileRunner, tile_batch: int = TILE_BATCH) -> Tensor:
        """Latents [1, C, h, w] float32 -> the picture's values [3, H, W], 0 .. 1 and a little beyond.

        run: calls the network on all tiles, which have one shape, at most `tile_batch` at once; 0 = there is
        one tile, the whole picture.
        """
        ...

    def preview(self, latents: Tensor) -> Tensor:
        """A cheap small picture of half-denoised latents: values [3, h, w], 0 .. 1 and a little beyond."""
        ...


@dataclass(frozen=True)
class TensorSource:
    """Stored tensors, by name, that make one parameter: make(*tensors) has the parameter's shape.

    A tensor stored in 8 bits with a scale beside it is expanded by the loader before it gets here. by_rows:
    make only puts whole rows in order, so that it may be given 8-bit values as they are, and then their
    scales [N, 1], for a layer that runs in that very format.
    """

    names: tuple[str, ...]
    make: Callable[..., Tensor]
    by_rows: bool = False


@dataclass(frozen=True)
class TensorMap:
    """sources: our parameter -> where it comes from. unused: stored tensors without a place in this model."""

    sources: Mapping[str, TensorSource]
    unused: frozenset[str]


@dataclass(frozen=True)
class StoredRows:
    """Where a stored matrix lies in a parameter of ours: row i of it is row rows[i] of that."""

    parameter: str
    rows: Tensor


@dataclass(frozen=True)
class HubFiles:
    """What to fetch of a hub repository, and of others for what it lacks.

    names: files of the repository. elsewhere: component -> (repository, folder in it).
    """

    names: tuple[str, ...]
    elsewhere: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@runtime_checkable
class Family(Protocol):
    """A kind of model: the door through which the engine reaches its folder, or a plugin's package.

    The object itself is torch-free; `build` and `tensor_map` import what they need.
    """

    @property
    def name(self) -> str: ...

    @property
    def models(self) -> Mapping[str, Path | None]:
        """What recipes call its models, each with the folder of the checkpoint that ships with it, if any."""
        ...

    def read_spec(
        self,
        model: str,
        checkpoint: Path | None,
        *,
        dialect: str = "auto",
        components: Mapping[str, Path] | None = None,
    ) -> ModelSpec:
        """The spec from the configs of a checkpoint's folder or file; None = as published. Needs no torch.

        dialect: how its tensors are named and ordered, when they do not say. components: the folders or
        files of parts that lie elsewhere.
        """
        ...

    def build(self, spec: ModelSpec, dtypes: Mapping[str, torch.dtype]) -> Model:
        """The model of a spec of this family on the meta device, each component in its dtype."""
        ...

    def places(self, component: str, spec: ModelSpec) -> tuple[Path, ...]:
        """The folders and files of the component's tensors, inside the checkpoint or absolute."""
        ...

    def tensor_map(
        self,
        component: str,
        shapes: Mapping[str, tuple[int, ...]],
        spec: ModelSpec,
        *,
        texts: Mapping[str, bytes] | None = None,
    ) -> TensorMap:
        """How the stored tensors of a component, given by name and shape, become its parameters.

        texts: what the short rows of bytes among them hold.
        """
        ...

    def stored_rows(
        self, component: str, shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec
    ) -> Mapping[str, Mapping[str, StoredRows]]:
        """Dialect -> stored name -> where its rows lie, for the matrices among a component's parameters.

        Adapters are read by it. shapes: of the parameters. The dialect of the spec's checkpoint comes first.
        """
        ...

    def hub_files(self, names: Sequence[str], *, dialect: str = "auto") -> HubFiles:
        """Which files of a hub repository make one checkpoint. Raises WeightsError when none do."""
        ...
