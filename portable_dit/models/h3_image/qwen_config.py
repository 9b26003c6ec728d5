"""What the big text encoder's own config says: Qwen3-VL in transformers' spelling. Torch-free.

Defaults: Qwen3-VL-32B, as MiniMax-H3 ships it. H3-Image takes the state behind decoder layer 50 of 64, before
any final norm, so the layers behind it, the norm and the word head are never read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

from portable_dit.errors import WeightsError
from portable_dit.models.config_json import inner_object, read_config

WHERE = "text_encoder/config.json"
STATE = 50  # which hidden state the transformer takes, 0 = the word embeddings


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower. Of the patches of a picture, merge_size x merge_size make one row of the text."""

    depth: int = 27
    hidden_size: int = 1152
    ffn_size: int = 4304
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 16
    merge_size: int = 2
    temporal_patch_size: int = 2
    out_hidden_size: int = 5120
    num_position_embeddings: int = 2304
    deepstack: tuple[int, ...] = (8, 16, 24)
    notes: tuple[str, ...] = ()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def row_side(self) -> int:
        """Pixels along each side of what one row of the text stands for."""
        return self.patch_size * self.merge_size

    def problems(self) -> list[str]:
        """Sizes that do not go together."""
        problems = []
        if self.hidden_size % (4 * self.num_heads):
            problems.append(
                f"the vision tower's hidden_size = {self.hidden_size} must be a multiple of four times its "
                f"num_heads = {self.num_heads}"
            )
        if math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            problems.append(f"num_position_embeddings = {self.num_position_embeddings} must be a square")
        if any(layer >= self.depth for layer in self.deepstack):
            problems.append(
                f"deepstack_visual_indexes = {list(self.deepstack)} must be below depth = {self.depth}"
            )
        if self.in_channels != 3:
            problems.append(f"in_channels = {self.in_channels} must be 3, red, green and blue")
        return problems


@dataclass(frozen=True)
class ImageProcessorConfig:
    """How the vision tower wants its pictures, from processor/preprocessor_config.json.

    min_pixels, max_pixels: bounds of the area; beyond, a picture is resized once more, for this tower alone.
    Defaults: Qwen3-VL's own.
    """

    min_pixels: int = 65_536
    max_pixels: int = 16_777_216
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    notes: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ImageProcessorConfig:
        where = "processor/preprocessor_config.json"
        size = inner_object(raw, "size", where)
        known = {key: raw[key] for key in ("image_mean", "image_std") if key in raw}
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            # The areas, under whichever name; null means that the other one says it.
            places = ((raw, name), (size, edge), (size, name))
            known |= next(({key: part[key]} for part, key in places if part.get(key) is not None), {})
        guesses = ("min_pixels", "max_pixels", "image_mean", "image_std")
        return read_config(cls, known, _EDGES, unpublished=guesses, where=where)


@dataclass(frozen=True)
class QwenConfig:
    """The text encoder of H3-Image. num_layers: of the checkpoint; `used_layers` of them run."""

    kind: ClassVar[str] = "qwen3_vl"

    hidden_size: int = 5120
    num_layers: int = 64
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int = 128
    ffn_size: int = 25600
    vocab_size: int = 151936
    rms_norm_eps: float = 1e-6
    max_tokens: int = 262144
    rope_theta: float = 5e6
    mrope_section: tuple[int, ...] = (24, 20, 20)
    image_token_id: int = 151655
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    vision: VisionConfig = field(default_factory=VisionConfig)
    processor: ImageProcessorConfig = field(default_factory=ImageProcessorConfig)
    notes: tuple[str, ...] = ()

    @property
    def used_layers(self) -> int:
        return STATE

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> QwenConfig:
        """From text_encoder/config.json and, where there is one, processor/preprocessor_config.json.

        Raises WeightsError when there are not more layers than the state needs, or when the parts do not fit.
        """
        text = inner_object(raw, "text_config", WHERE)
        rope = inner_object(text, "rope_parameters", WHERE) or inner_object(text, "rope_scaling", WHERE)
        flat = {**text, **{key: raw[key] for key in _TOKENS if key in raw}}
        flat["rope_theta"] = rope.get("rope_theta", text.get("rope_theta", cls.rope_theta))
        flat["mrope_section"] = rope.get("mrope_section", list(cls.mrope_section))
        plain = read_config(_Flat, flat, _SPELLINGS, unpublished=(), where=WHERE)
        vision = read_config(
            VisionConfig,
            inner_object(raw, "vision_config", WHERE),
            _VISION_SPELLINGS,
            unpublished=(),
            where=WHERE,
        )
        pictures = ImageProcessorConfig.from_dict(processor or {})
        values = {f.name: getattr(plain, f.name) for f in fields(_Flat) if f.name != "notes"}
        config = cls(**values, vision=vision, processor=pictures, notes=pictures.notes)
        config._check()
        return config

    def to_dict(self) -> dict[str, Any]:
        """The content of transformers' config.json."""
        return {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": self.kind,
            **{key: getattr(self, key) for key in _TOKENS},
            "video_token_id": self.image_token_id + 1,
            "tie_word_embeddings": False,
            "text_config": self.text_dict(),
            "vision_config": self.vision_dict(),
        }

    def text_dict(self) -> dict[str, Any]:
        """The block text_config."""
        theirs = {ours: name for name, ours in _SPELLINGS.items()}
        values = {
            theirs.get(f.name, f.name): getattr(self, f.name)
            for f in fields(_Flat)
            if f.name not in ("notes", "rope_theta", "mrope_section", *_TOKENS)
        }
        rope = {
            "rope_type": "default",
            "rope_theta": self.rope_theta,
            "mrope_section": list(self.mrope_section),
            "mrope_interleaved": True,
        }
        return {"model_type": "qwen3_vl_text", **values, "rope_parameters": rope}

    def vision_dict(self) -> dict[str, Any]:
        """The block vision_config."""
        theirs = {ours: name for name, ours in _VISION_SPELLINGS.items()}
        values = {theirs.get(k, k): v for k, v in asdict(self.vision).items() if k != "notes"}
        values["deepstack_visual_indexes"] = list(self.vision.deepstack)
        return {"model_type": "qwen3_vl_vision", **values}

    def processor_dict(self) -> dict[str, Any]:
        """The content of processor/preprocessor_config.json."""
        vision, pictures = self.vision, self.processor
        return {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "merge_size": vision.merge_size,
            "image_mean": list(pictures.image_mean),
            "image_std": list(pictures.image_std),
            "size": {"shortest_edge": pictures.min_pixels, "longest_edge": pictures.max_pixels},
        }

    def vision_size(self, width: int, height: int) -> tuple[int, int]:
        """The size at which the tower sees a picture: (width, height), sides whole rows of the text.

        Source: smart_resize of Qwen2-VL's image processor. A size inside the bounds stays as it is.
        """
        side, area = self.vision.row_side, width * height
        across, down = (max(round(pixels / side), 1) * side for pixels in (width, height))
        if across * down > self.processor.max_pixels:
            shrink = math.sqrt(area / self.processor.max_pixels)
            across, down = (max(math.floor(p / shrink / side), 1) * side for p in (width, height))
        elif across * down < self.processor.min_pixels:
            grow = math.sqrt(self.processor.min_pixels / area)
            across, down = (math.ceil(p * grow / side) * side for p in (width, height))
        return across, down

    def vision_rows(self, width: int, height: int) -> int:
        """Rows of the text that a picture of this size takes, without the two marks around them."""
        across, down = self.vision_size(width, height)
        return (across // self.vision.row_side) * (down // self.vision.row_side)

    def _check(self) -> None:
        if self.num_layers <= STATE:
            raise WeightsError(
                f"{WHERE}: {self.num_layers} layers; the transformer takes the state behind layer {STATE}, "
                f"before any final norm, so there must be more than {STATE}. Use the checkpoint's own."
            )
        marks = {name: getattr(self, name) for name in _TOKENS}
        if max(marks.values()) >= self.vocab_size:
            raise WeightsError(
                f"{WHERE}: {', '.join(f'{name} = {mark}' for name, mark in marks.items())}: must be below "
                f"vocab_size = {self.vocab_size}. Restore the file from the checkpoint."
            )
        problems = [*self._text_problems(), *self.vision.problems()]
        if problems:
            raise WeightsError(f"{WHERE}: {'; '.join(problems)}. Restore the file from the checkpoint.")

    def _text_problems(self) -> list[str]:
        problems = []
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"{self.num_key_value_heads} key heads (num_key_value_heads) must divide "
                f"{self.num_attention_heads} query heads (num_attention_heads)"
            )
        if 2 * sum(self.mrope_section) != self.head_dim:
            problems.append(
                f"mrope_section = {list(self.mrope_section)} must add up to half of a head's channels "
                f"(head_dim = {self.head_dim})"
            )
        if self.vision.out_hidden_size != self.hidden_size:
            problems.append(
                f"the vision tower gives rows of width {self.vision.out_hidden_size} (out_hidden_size), the "
                f"text takes {self.hidden_size} (hidden_size): they must be equal"
            )
        return problems


@dataclass(frozen=True)
class _Flat:
    """The fields of QwenConfig that are single values in the file, with the same defaults."""

    hidden_size: int = QwenConfig.hidden_size
    num_layers: int = QwenConfig.num_layers
    num_attention_heads: int = QwenConfig.num_attention_heads
    num_key_value_heads: int = QwenConfig.num_key_value_heads
    head_dim: int = QwenConfig.head_dim
    ffn_size: int = QwenConfig.ffn_size
    vocab_size: int = QwenConfig.vocab_size
    rms_norm_eps: float = QwenConfig.rms_norm_eps
    max_tokens: int = QwenConfig.max_tokens
    rope_theta: float = QwenConfig.rope_theta
    mrope_section: tuple[int, ...] = QwenConfig.mrope_section
    image_token_id: int = QwenConfig.image_token_id
    vision_start_token_id: int = QwenConfig.vision_start_token_id
    vision_end_token_id: int = QwenConfig.vision_end_token_id
    notes: tuple[str, ...] = ()


def is_qwen(raw: Mapping[str, Any]) -> bool:
    """Whether a text encoder's config.json is of this kind."""
    return raw.get("model_type") == QwenConfig.kind


_TOKENS = ("image_token_id", "vision_start_token_id", "vision_end_token_id")
_EDGES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
_SPELLINGS = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_size",
    "max_position_embeddings": "max_tokens",
}
_VISION_SPELLINGS = {
    "intermediate_size": "ffn_size",
    "spatial_merge_size": "merge_size",
    "deepstack_visual_indexes": "deepstack",
}

# Small enough for tests, with as many layers as the state needs and one more.
TINY_QWEN = QwenConfig(
    hidden_size=16,
    num_layers=STATE + 1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    ffn_size=24,
    vocab_size=512,
    max_tokens=4096,
    mrope_section=(6, 5, 5),
    vision_start_token_id=508,
    image_token_id=509,
    vision_end_token_id=511,
    vision=replace(
        VisionConfig(),
        depth=3,
        hidden_size=16,
        ffn_size=24,
        num_heads=2,
        out_hidden_size=16,
        num_position_embeddings=16,
        deepstack=(0, 2),
    ),
)
