"""What a plan needs of the H3-Image family: rules, layers and bytes, from the configs. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from portable_dit.capabilities import AttentionRequest, FusionRequest
from portable_dit.models.h3_image import counts
from portable_dit.models.h3_image.config import H3Config
from portable_dit.models.h3_image.qwen_config import QwenConfig
from portable_dit.models.sizes import SizeRules, Tier
from portable_dit.models.spec import (
    DTYPE_BYTES,
    TILE_BATCH,
    Bytes,
    LinearGroup,
    ModelSpec,
    Numbers,
    TensorSplit,
    Workload,
    linear_bytes,
    matches,
)

MAX_REFERENCE_RATIO = 4.0  # beyond, scaling to a fixed area makes slivers
# "<Picture 16>: ", vision start and end: what a reference adds to the text at most, beside its patches.
LABEL_ROWS = 9
# 1K is drawn at 2048 x 2048 and halved, as vLLM-Omni does for H3-Image.
TIERS = (Tier("1K", 2048 * 2048, shrink=2), Tier("2K", 2048 * 2048), Tier("4K", 4096 * 4096))
LAYOUTS = ("tensor", "ulysses", "ring", "data", "text_encoder_tensor", "vae_tiles")
ASSUMED_PROMPT_TOKENS = 512  # of the big encoder, which takes far more than people write
# Quantising these too costs far more quality than it saves: LPIPS 0.140 -> 0.161 in int8, 0.255 -> 0.308 in
# fp8 (unsloth's figures for H3-Image).
KEEP = ("condition_proj", "token_refiner")
TEMPORARY = ("blocks.*.adaln_proj.*", "final_layer.adaln_proj.*")
PRODUCERS = (
    ("blocks.*.norm1", "blocks.*.attn.qkv_proj"),
    ("blocks.*.norm2", "blocks.*.mlp.fc1"),
    ("blocks.*.mlp.act", "blocks.*.mlp.fc2"),
)


@dataclass(frozen=True, kw_only=True)
class H3Spec(ModelSpec):
    """The family's ModelSpec; `config` is what the model is built from."""

    config: H3Config

    def rows(self, workload: Workload) -> int:
        return self._prefix_rows(workload) + self._patches(workload.width, workload.height)

    def attention_requests(self, workload: Workload, dtype: str) -> Sequence[tuple[str, AttentionRequest]]:
        text_rows = self._text_rows(workload)
        dit, vae, text = self.config.dit, self.config.vae, self.config.text
        heads = dit.num_attention_heads
        tile = min(vae.tile_size, workload.width) * min(vae.tile_size, workload.height) // vae.ratio**2
        requests = [
            ("dit", _attention(dtype, dit.attention_head_dim, heads, self.rows(workload))),
            ("dit", _attention(dtype, dit.attention_head_dim, heads, text_rows)),
            (
                "vae",
                _attention(
                    dtype,
                    vae.decoder_attention_head_dim,
                    vae.decoder_num_attention_heads,
                    tile + vae.decoder_num_register_tokens + 1,
                ),
            ),
        ]
        heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
        if isinstance(text, QwenConfig):
            patches = text.vision.merge_size**2
            requests += [  # each picture sees itself alone in the tower
                (
                    "text_encoder",
                    _attention(
                        dtype, text.vision.head_dim, text.vision.num_heads, patches * text.vision_rows(*size)
                    ),
                )
                for size in dict.fromkeys(workload.reference_sizes)
            ]
        causal = AttentionRequest(dtype, text.head_dim, heads, kv_heads, text_rows, mask="causal")
        return (("text_encoder", causal), *requests)

    def fusion_requests(self, component: str, dtype: str) -> Sequence[FusionRequest]:
        dit, vae = self.config.dit, self.config.vae
        width = dit.hidden_size
        if component == "vae":
            return (
                FusionRequest("norm_cast", dtype, vae.decoder_hidden_size),
                FusionRequest("scaled_residual", dtype, vae.decoder_hidden_size),
                FusionRequest("head_norm_rotary", dtype, vae.decoder_attention_head_dim),
                FusionRequest("swiglu", dtype, vae.decoder_ffn_mult * vae.decoder_hidden_size),
            )
        if component == "text_encoder":
            text = self.config.text
            return (
                FusionRequest("rms_norm", dtype, text.hidden_size),
                FusionRequest("head_norm_rotary", dtype, text.head_dim),
                FusionRequest("swiglu", dtype, text.ffn_size),
            )
        return (
            FusionRequest("norm_modulate", dtype, width),
            FusionRequest("gated_residual", dtype, width),
            FusionRequest("head_norm_rotary", dtype, dit.attention_head_dim),
            FusionRequest("swiglu", dtype, dit.ffn_hidden_size),
            FusionRequest("rms_norm", dtype, width),
        )

    def bytes_on_device(self, component: str, workload: Workload, numbers: Numbers) -> Bytes:
        match component:
            case "dit":
                return self._dit_bytes(workload, numbers)
            case "vae":
                return self._vae_bytes(workload, numbers)
            case _:
                return self._text_bytes(workload, numbers)

    def reference_size(self, width: int, height: int, *, canvas: tuple[int, int]) -> tuple[int, int]:
        scheduler, multiple = self.config.scheduler, self.sizes.multiple
        if scheduler.reference_rule == "canvas":
            if self.edit_size(width, height) == canvas:
                return canvas
            scale = math.sqrt(canvas[0] * canvas[1] / (width * height))
            return self.sizes.nearest(width * scale, height * scale)
        scale = math.sqrt(scheduler.reference_pixels / (width * height))
        if scheduler.reference_rule == "short_edge":
            scale = math.sqrt(scheduler.reference_pixels) / min(width, height)
        elif scheduler.reference_rule == "fit":
            scale = min(scale, 1.0)
        wide, high = (max(round(side * scale / multiple), 1) * multiple for side in (width, height))
        return wide, high

    def edit_size(self, width: int, height: int) -> tuple[int, int]:
        if self.config.scheduler.reference_rule == "canvas":
            return self.sizes.nearest(width, height)
        return self.reference_size(width, height, canvas=self.sizes.default)

    def prompt_problem(self, prompt: str, reference_sizes: Sequence[tuple[int, int]]) -> str | None:
        from portable_dit.models.h3_image.tokens import prompt_problem  # brings a library that a plan spares

        return prompt_problem(prompt, reference_sizes, self.config)

    def decode_flops(self, width: int, height: int) -> float:
        tokens, count = counts.decode_tokens(self.config.vae, width=width, height=height)
        weights = sum(g.count * g.in_features * g.out_features for g in self.linears if g.component == "vae")
        inner = self.config.vae.decoder_num_attention_heads * self.config.vae.decoder_attention_head_dim
        attention = 4 * tokens * inner * self.config.vae.decoder_num_layers
        return float(count * tokens * (2 * weights + attention))

    def _patches(self, width: int, height: int) -> int:
        side = self.config.vae.ratio * self.config.dit.patch_size[1]
        return (width // side) * (height // side)

    def _vision_rows(self, workload: Workload) -> int:
        """Rows by which the text encoder sees the references; the small one does not."""
        text = self.config.text
        if not isinstance(text, QwenConfig):
            return 0
        return sum(text.vision_rows(*size) for size in workload.reference_sizes)

    def _text_rows(self, workload: Workload) -> int:
        text = self.config.text
        has_labels = isinstance(text, QwenConfig) or text.picture_labels
        labels = LABEL_ROWS * len(workload.reference_sizes) if has_labels else 0
        return workload.prompt_tokens + labels + self._vision_rows(workload)

    def _prefix_rows(self, workload: Workload) -> int:
        return self._text_rows(workload) + sum(self._patches(*size) for size in workload.reference_sizes)

    def _saved(self, component: str, numbers: Numbers, *, within: str = "") -> int:
        """Bytes that the format takes off the component's linears, or off those named `within`..."""
        if numbers.format is None:
            return 0
        saved = 0
        for group in self.linears:
            if group.component == component and group.pattern.startswith(within):
                shape = group.out_features, group.in_features
                each = linear_bytes(numbers.dtype, *shape) - linear_bytes(numbers.format, *shape)
                saved += each * sum(not matches(name, numbers.keep) for name in group.names())
        return saved

    def _dit_bytes(self, workload: Workload, numbers: Numbers) -> Bytes:
        config, item = self.config.dit, DTYPE_BYTES[numbers.dtype]
        c = counts.dit_counts(config)
        in_blocks = item * c.block * config.num_layers - self._saved("dit", numbers, within="blocks.")
        around = self._saved("dit", numbers) - self._saved("dit", numbers, within="blocks.")
        # One table row for every step, and one for the references, whose time never changes.
        times = self.config.scheduler.num_inference_steps + 1
        parts = {
            "blocks": in_blocks,
            "refiner and text projection": item * (c.refiner + c.other) - around,
            "modulation tables": item * counts.table_values(config, times),
            "float32 layers and heads": 4 * (c.float32 + c.heads),
        }
        live = counts.dit_live_bytes(
            config, rows=self.rows(workload), prefix_rows=self._prefix_rows(workload), itemsize=item
        )
        return Bytes(
            weights=sum(parts.values()),
            activations=live,
            parts=parts,
            loading=(4 if config.adaln_form == "curve" else item) * c.modulation,
            block=in_blocks // config.num_layers,
            num_blocks=config.num_layers,
        )

    def _vae_bytes(self, workload: Workload, numbers: Numbers) -> Bytes:
        config, item = self.config.vae, DTYPE_BYTES[numbers.dtype]
        encoder, decoder = counts.vae_parameters(config)
        in_linears = sum(
            g.count * g.in_features * g.out_features for g in self.linears if g.component == "vae"
        )
        parts = {
            "encoder": 4 * encoder,
            "decoder": 4 * (decoder - in_linears) + item * in_linears - self._saved("vae", numbers),
        }
        batch = workload.tile_batch
        live = counts.decode_live_bytes(
            config, width=workload.width, height=workload.height, itemsize=item, tile_batch=batch
        )
        for width, height in workload.reference_sizes:
            encoding = counts.encode_live_bytes(
                config, width=width, height=height, tile_batch=min(batch, TILE_BATCH)
            )
            live = max(live, encoding)
        return Bytes(sum(parts.values()), live, parts)

    def _text_bytes(self, workload: Workload, numbers: Numbers) -> Bytes:
        config, item = self.config.text, DTYPE_BYTES[numbers.dtype]
        c = counts.text_counts(config)
        in_layers = item * c.block * c.num_blocks - self._saved("text_encoder", numbers)
        parts = {"layers": in_layers, "table and vision tower": item * c.other}
        live = counts.text_live_bytes(
            config, rows=self._text_rows(workload), vision_rows=self._vision_rows(workload), itemsize=item
        )
        return Bytes(
            sum(parts.values()), live, parts, block=in_layers // c.num_blocks, num_blocks=c.num_blocks
        )


def make_spec(model: str, config: H3Config, *, notes: tuple[str, ...] = ()) -> H3Spec:
    """The spec of a checkpoint with these configs. notes: what a plan should say beside the configs' own."""
    dit, text, canvas = config.dit, config.text, config.canvas
    return H3Spec(
        id=model,
        family="h3_image",
        sizes=SizeRules(
            multiple=canvas.multiple,
            min_side=canvas.min_side,
            max_side=canvas.max_side,
            max_pixels=canvas.max_pixels,
            max_ratio=canvas.max_ratio,
            default=(canvas.default_width, canvas.default_height),
            tiers=tuple(tier for tier in TIERS if tier.area <= canvas.max_pixels),
            small_pixels=canvas.small_pixels,
            well_drawn=canvas.well_drawn,
        ),
        # Each output head belongs to one noise level, so another step count would meet the wrong heads.
        steps=(config.scheduler.num_inference_steps,),
        has_guidance=False,
        default_guidance=None,
        max_references=config.scheduler.max_references,
        # References of the size of the canvas must be of a shape that the canvas may have.
        max_reference_ratio=(
            canvas.max_ratio
            if config.scheduler.reference_rule == "canvas"
            else max(MAX_REFERENCE_RATIO, canvas.max_ratio)
        ),
        max_prompt_characters=canvas.max_prompt_characters,
        num_heads=dit.num_attention_heads,
        num_kv_heads=dit.num_attention_heads,
        head_dim=dit.attention_head_dim,
        num_blocks=dit.num_layers,
        hidden_size=dit.hidden_size,
        latent_channels=config.vae.latent_channels,
        latent_ratio=config.vae.ratio,
        ffn_size=dit.ffn_hidden_size,
        num_experts=0,
        keep=KEEP,
        supported_layouts=LAYOUTS,
        # float16 ends at 65504 and the family's activations reach hundreds before their products are summed.
        dtypes=("bfloat16", "float32"),
        # The decoder's linears run in the recipe's type, as diffusers runs them: 93 TFLOP at 4096x4096. What
        # the small model's VAE would win is not worth other pictures than its gates were measured on.
        float32_components=() if isinstance(text, QwenConfig) else ("vae",),
        prompt_tokens=ASSUMED_PROMPT_TOKENS if isinstance(text, QwenConfig) else text.max_tokens,
        notes=(*notes, *config.notes),
        linears=_linears(config),
        requires={"transformers": "pip install 'portable-dit[h3]', or pip install '.[h3]' in a clone"}
        if isinstance(text, QwenConfig)
        else {},
        producers=PRODUCERS,
        temporary=TEMPORARY,
        tensor_plan=_tensor_plan(config),
        num_text_heads=text.num_key_value_heads,
        text_ffn_size=text.ffn_size,
        config=config,
    )


def _tensor_plan(config: H3Config) -> tuple[TensorSplit, ...]:
    """The blocks' layers and the text encoder's. The refiner's few rows are not worth an exchange."""
    dit = config.dit
    inner, ffn = dit.inner_size, dit.ffn_hidden_size
    text = [f"layers.*.self_attn.{name}_proj" for name in "qkv"]
    text += ["layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"]
    return (
        TensorSplit("dit", "blocks.*.attn.qkv_proj", "out", (inner,) * 3),
        TensorSplit("dit", "blocks.*.attn.out_proj", "in"),
        TensorSplit("dit", "blocks.*.mlp.fc1", "out", (ffn,) * 2),
        TensorSplit("dit", "blocks.*.mlp.fc2", "in"),
        *(TensorSplit("text_encoder", pattern, "out") for pattern in text),
        TensorSplit("text_encoder", "layers.*.self_attn.o_proj", "in"),
        TensorSplit("text_encoder", "layers.*.mlp.down_proj", "in"),
    )


def _linears(config: H3Config) -> tuple[LinearGroup, ...]:
    dit, vae = config.dit, config.vae
    width, inner, ffn = dit.hidden_size, dit.inner_size, dit.ffn_hidden_size
    groups = [LinearGroup("dit", "condition_proj", 1, dit.text_dim, width)]
    for above, count in (("blocks", dit.num_layers), ("token_refiner.blocks", dit.token_refiner_num_layers)):
        groups += [
            LinearGroup("dit", f"{above}.*.attn.qkv_proj", count, width, 3 * inner),
            LinearGroup("dit", f"{above}.*.attn.out_proj", count, inner, width),
            LinearGroup("dit", f"{above}.*.mlp.fc1", count, width, 2 * ffn),
            LinearGroup("dit", f"{above}.*.mlp.fc2", count, ffn, width),
        ]
    hidden, expanded = vae.decoder_hidden_size, vae.decoder_ffn_mult * vae.decoder_hidden_size
    heads = vae.decoder_num_attention_heads * vae.decoder_attention_head_dim
    for name, inputs, outputs in (
        ("attn.to_qkv", hidden, 3 * heads),
        ("attn.to_out", heads, hidden),
        ("ff.w1", hidden, 2 * expanded),
        ("ff.w2", expanded, hidden),
    ):
        pattern = f"decoder.transformer_blocks.*.{name}"
        groups.append(LinearGroup("vae", pattern, vae.decoder_num_layers, inputs, outputs))
    return (*groups, *_text_linears(config))


def _text_linears(config: H3Config) -> tuple[LinearGroup, ...]:
    text = config.text
    width, ffn, layers = text.hidden_size, text.ffn_size, text.num_layers
    queries = keys = text.num_attention_heads * text.head_dim
    if isinstance(text, QwenConfig):
        layers, keys = text.used_layers, text.num_key_value_heads * text.head_dim
    shapes = (
        ("self_attn.q_proj", width, queries),
        ("self_attn.k_proj", width, keys),
        ("self_attn.v_proj", width, keys),
        ("self_attn.o_proj", queries, width),
        ("mlp.gate_proj", width, ffn),
        ("mlp.up_proj", width, ffn),
        ("mlp.down_proj", ffn, width),
    )
    return tuple(
        LinearGroup("text_encoder", f"layers.*.{name}", layers, inputs, outputs)
        for name, inputs, outputs in shapes
    )


def _attention(dtype: str, head_dim: int, heads: int, rows: int) -> AttentionRequest:
    return AttentionRequest(dtype, head_dim, heads, heads, rows)
