"""What a plan needs of HunyuanImage-3.0: rules, layers and bytes, from the configs. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from portable_dit.capabilities import AttentionRequest, FusionRequest
from portable_dit.models.hunyuan_image_3.config import DiTConfig, HunyuanConfig, VAEConfig
from portable_dit.models.hunyuan_image_3.names import (
    dit_tensors,
    layer_tensors,
    taps_of,
    vae_decoder_tensors,
)
from portable_dit.models.sizes import SizeRules, Tier
from portable_dit.models.spec import (
    DTYPE_BYTES,
    Bytes,
    LinearGroup,
    ModelSpec,
    Numbers,
    TensorSplit,
    Workload,
    linear_bytes,
    matches,
)
from portable_dit.models.tiling import TileAxis, tile_axis

# Tiles of 384 pixels with a quarter shared, as the publishers cut them where they do.
TILE_CELLS, OVERLAP_CELLS = 24, 6
ASSUMED_PROMPT_TOKENS = 256  # a long prompt; a system prompt of the checkpoint's adds up to 2,000
MAX_PROMPT_CHARACTERS = 100_000  # the tokenizer's own limit comes first in any language
LAYOUTS = ("tensor", "ulysses", "guidance", "expert", "data", "vae_tiles")
PRODUCERS = (
    ("layers.*.input_layernorm", "layers.*.self_attn.qkv_proj"),
    ("layers.*.mlp.shared_mlp.act", "layers.*.mlp.shared_mlp.down_proj"),
    ("layers.*.mlp.experts.act", "layers.*.mlp.experts.down_proj"),
)
# Live copies of the largest tensor while the autoencoder decodes: input, norm, the frames that a convolution
# made and their stack, and what a convolution's library lays out anew.
DECODE_COPIES = 6
DECODE_FLOPS_PER_PIXEL = 82e12 / 1024**2  # at 1024 x 1024, without the taps that act on nothing
NORM_BYTES = 4 * (512 << 20)  # float32 values of a norm's chunk, and what is made of them


@dataclass(frozen=True, kw_only=True)
class HunyuanSpec(ModelSpec):
    """The family's ModelSpec; `config` is what the model is built from."""

    config: HunyuanConfig

    def rows(self, workload: Workload) -> int:
        return self.guidance_branches * (self.config.dit.slots + self._cells(workload))

    def attention_requests(self, workload: Workload, dtype: str) -> Sequence[tuple[str, AttentionRequest]]:
        dit, cells = self.config.dit, self._cells(workload)
        heads = dit.attention_head_dim, dit.num_attention_heads, dit.num_key_value_heads
        prefix = workload.prompt_tokens
        rows = prefix + dit.slots + cells
        channels = self.config.vae.levels[0]
        return (
            ("dit", AttentionRequest(dtype, *heads, rows, mask="causal_with_full_spans")),
            ("dit", AttentionRequest(dtype, *heads, prefix, mask="causal")),
            ("vae", AttentionRequest(dtype, channels, 1, 1, cells)),
        )

    def fusion_requests(self, component: str, dtype: str) -> Sequence[FusionRequest]:
        if component == "vae":
            widths = dict.fromkeys(self.config.vae.levels)
            return tuple(FusionRequest("frame_norm", dtype, channels) for channels in widths)
        if component != "dit":
            return ()
        dit = self.config.dit
        return (
            FusionRequest("rms_norm", dtype, dit.hidden_size),
            FusionRequest("rotary_head_norm", dtype, dit.attention_head_dim),
            FusionRequest("swiglu", dtype, dit.moe_intermediate_size),
            FusionRequest("swiglu", dtype, dit.shared_size),
            FusionRequest("route", dtype, dit.hidden_size),
            FusionRequest("deal", dtype, dit.num_experts),
            FusionRequest("expert_linear", dtype, dit.hidden_size),
            FusionRequest("combine_experts", dtype, dit.hidden_size),
        )

    def bytes_on_device(self, component: str, workload: Workload, numbers: Numbers) -> Bytes:
        match component:
            case "dit":
                return self._dit_bytes(workload, numbers)
            case "vae":
                return self._vae_bytes(workload, numbers)
            case _:
                dit, item = self.config.dit, DTYPE_BYTES[numbers.dtype]
                table = item * dit.vocab_size * dit.hidden_size
                live = 2 * item * (workload.prompt_tokens + 64) * dit.hidden_size
                return Bytes(table, live, {"token table": table})

    def reference_size(self, width: int, height: int, *, canvas: tuple[int, int]) -> tuple[int, int]:
        return canvas

    def edit_size(self, width: int, height: int) -> tuple[int, int]:
        return self.sizes.nearest(width, height)

    def prompt_problem(self, prompt: str, reference_sizes: Sequence[tuple[int, int]]) -> str | None:
        from portable_dit.models.hunyuan_image_3.tokens import prompt_problem  # brings a library

        return prompt_problem(prompt, self.config)

    def decode_flops(self, width: int, height: int) -> float:
        return DECODE_FLOPS_PER_PIXEL * width * height

    def _cells(self, workload: Workload) -> int:
        return workload.width * workload.height // self.config.vae.ffactor_spatial**2

    def _saved(self, numbers: Numbers) -> int:
        """Bytes that the format takes off the layers."""
        if numbers.format is None:
            return 0
        saved = 0
        for group in self.linears:
            shape = group.out_features, group.in_features
            each = linear_bytes(numbers.dtype, *shape) - linear_bytes(numbers.format, *shape)
            count = sum(not matches(name, numbers.keep) for name in group.names())
            saved += each * count * (group.experts or 1)
        return saved

    def _dit_bytes(self, workload: Workload, numbers: Numbers) -> Bytes:
        config, item = self.config.dit, DTYPE_BYTES[numbers.dtype]
        layers = config.num_hidden_layers
        total = _count(dit_tensors(config, self.config.vae.latent_channels))
        in_layers = layers * _count(layer_tensors(config, ""))
        held = item * in_layers - self._saved(numbers)
        parts = {"layers": held, "patch embedding, final layer, times": item * (total - in_layers)}
        return Bytes(
            weights=sum(parts.values()),
            activations=self._dit_live(workload, item),
            parts=parts,
            block=held // layers,
            num_blocks=layers,
        )

    def _dit_live(self, workload: Workload, item: int) -> int:
        """The widest moment of a step: experts, attention or the last convolutions, beside what stays."""
        config = self.config.dit
        width, rows = config.hidden_size, self.rows(workload)
        keys = config.num_key_value_heads * config.attention_head_dim
        stays = (
            self._prefix_bytes(workload, item) + 3 * rows * width * item
        )  # residual, its norm, the branch that is added
        chosen = rows * config.moe_topk
        hidden = config.moe_intermediate_size
        experts = chosen * item * max(width + 2 * hidden, 3 * hidden, hidden + width)
        experts += 8 * rows * width  # float32 sums
        turned = 4 * rows * (config.inner_size + keys)  # queries and keys in float32
        attention = rows * item * (config.qkv_size + 3 * config.inner_size) + 2 * turned
        convolutions = 3 * 4 * rows * width
        return stays + max(experts, attention, convolutions)

    def _prefix_bytes(self, workload: Workload, item: int) -> int:
        """Keys and values of the prefix, which are kept for the next picture of the request."""
        config = self.config.dit
        keys = config.num_key_value_heads * config.attention_head_dim
        return 2 * config.num_hidden_layers * self.guidance_branches * workload.prompt_tokens * keys * item

    def _vae_bytes(self, workload: Workload, numbers: Numbers) -> Bytes:
        config, item = self.config.vae, DTYPE_BYTES[numbers.dtype]
        stored = vae_decoder_tensors(config)
        kept = sum(math.prod(shape) * _share_of_taps(name, self.config) for name, shape in stored.items())
        # Values of each level, per pixel of the picture: it has `frames` frames and its share of the pixels.
        per_pixel = max(
            channels * config.frames(level) * (2.0**level / config.ffactor_spatial) ** 2
            for level, channels in enumerate(config.levels)
        )
        pixels = workload.width * workload.height
        if workload.tile_batch:
            rows, columns = tile_axes(workload.width, workload.height, config)
            batch = min(workload.tile_batch, len(rows.starts) * len(columns.starts))
            pixels = batch * rows.size * columns.size
        values = round(per_pixel * pixels)
        live = DECODE_COPIES * item * values + min(NORM_BYTES, 16 * values)
        live += self._prefix_bytes(workload, DTYPE_BYTES["bfloat16"])
        weights = round(item * kept)
        return Bytes(weights, live, {"decoder": weights})


def make_spec(model: str, config: HunyuanConfig, *, notes: tuple[str, ...] = ()) -> HunyuanSpec:
    """The spec of a checkpoint with these configs. notes: what a plan should say beside the configs' own."""
    dit, generation, canvases = config.dit, config.generation, config.canvases
    base = dit.image_base_size
    sides = [side for size in canvases for side in size]
    return HunyuanSpec(
        id=model,
        family="hunyuan_image_3",
        sizes=SizeRules(
            multiple=config.vae.ffactor_spatial,
            min_side=min(sides),
            max_side=max(sides),
            max_pixels=max(width * height for width, height in canvases),
            max_ratio=max(max(size) / min(size) for size in canvases),
            default=(base, base),
            tiers=(Tier("1K", base * base),) if base == 1024 else (),
            canvases=canvases,
        ),
        steps=(),
        default_steps=generation.diff_infer_steps,
        has_guidance=True,
        default_guidance=generation.diff_guidance_scale,
        guidance_branches=dit.branches,
        max_references=0,
        max_reference_ratio=1.0,
        max_prompt_characters=MAX_PROMPT_CHARACTERS,
        system_prompts=config.system_prompts,
        hidden_size=dit.hidden_size,
        latent_channels=config.vae.latent_channels,
        latent_ratio=config.vae.ffactor_spatial,
        num_heads=dit.num_attention_heads,
        num_kv_heads=dit.num_key_value_heads,
        head_dim=dit.attention_head_dim,
        num_blocks=dit.num_hidden_layers,
        ffn_size=dit.moe_intermediate_size,
        num_experts=dit.num_experts,
        experts_per_row=dit.moe_topk,
        keep=(),
        supported_layouts=tuple(axis for axis in LAYOUTS if axis != "guidance" or dit.branches > 1),
        dtypes=("bfloat16", "float32"),
        float32_components=(),
        tiling="optional",
        own_dtypes={"vae": ("float16",)},
        streamed=("dit",),
        prompt_tokens=ASSUMED_PROMPT_TOKENS,
        notes=(*notes, *config.notes),
        linears=_linears(dit),
        producers=PRODUCERS,
        tensor_plan=_tensor_plan(dit),
        config=config,
    )


def tile_axes(width: int, height: int, config: VAEConfig) -> tuple[TileAxis, TileAxis]:
    """Rows and columns of tiles, in pixels, where a picture is decoded in tiles."""
    ratio = config.ffactor_spatial
    tile, overlap = TILE_CELLS * ratio, OVERLAP_CELLS * ratio
    rows, columns = (tile_axis(side, tile=tile, overlap=overlap, step=ratio) for side in (height, width))
    return rows, columns


def _linears(config: DiTConfig) -> tuple[LinearGroup, ...]:
    width, hidden, shared = config.hidden_size, config.moe_intermediate_size, config.shared_size
    shapes = (
        ("self_attn.qkv_proj", width, config.qkv_size, 0),
        ("self_attn.o_proj", config.inner_size, width, 0),
        ("mlp.shared_mlp.gate_and_up_proj", width, 2 * shared, 0),
        ("mlp.shared_mlp.down_proj", shared, width, 0),
        ("mlp.experts.gate_and_up_proj", width, 2 * hidden, config.num_experts),
        ("mlp.experts.down_proj", hidden, width, config.num_experts),
    )
    return tuple(
        LinearGroup("dit", f"layers.*.{name}", config.num_hidden_layers, inputs, outputs, experts)
        for name, inputs, outputs, experts in shapes
    )


def _tensor_plan(config: DiTConfig) -> tuple[TensorSplit, ...]:
    queries, keys = config.inner_size, config.num_key_value_heads * config.attention_head_dim
    hidden, shared, count = config.moe_intermediate_size, config.shared_size, config.num_experts
    layer = "layers.*."
    return (
        TensorSplit("dit", f"{layer}self_attn.qkv_proj", "out", (queries, keys, keys)),
        TensorSplit("dit", f"{layer}self_attn.o_proj", "in"),
        TensorSplit("dit", f"{layer}mlp.shared_mlp.gate_and_up_proj", "out", (shared, shared)),
        TensorSplit("dit", f"{layer}mlp.shared_mlp.down_proj", "in", sum_at=f"{layer}mlp"),
        TensorSplit("dit", f"{layer}mlp.experts.gate_and_up_proj", "out", (hidden, hidden), count),
        TensorSplit("dit", f"{layer}mlp.experts.down_proj", "in", (), count, sum_at=f"{layer}mlp"),
    )


def _count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _share_of_taps(name: str, config: HunyuanConfig) -> float:
    """How much of a decoder tensor is kept: of 3-D kernels only the taps that ever meet a frame."""
    is_kernel = name.endswith(".weight") and ".attn_1." not in name and "norm" not in name
    return len(taps_of(name.removeprefix("decoder."), config.vae)) / 3 if is_kernel else 1.0
