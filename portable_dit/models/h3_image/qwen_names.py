"""Which stored tensors of Qwen3-VL make our text encoder: the word table, 50 layers and the vision tower.

The word head, the final norm and the layers behind the state are left in the file: a quarter of its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from portable_dit.models.h3_image.qwen_config import QwenConfig
from portable_dit.models.spec import TensorMap, TensorSource

# transformers names it "model.language_model." and "model.visual."; older files "model." and "visual.".
_PREFIXES = (
    (re.compile(r"^(model\.language_model|language_model\.model|language_model)\."), ""),
    (re.compile(r"^model\.visual\."), "visual."),
    (re.compile(r"^model\.(?=(embed_tokens|layers|norm)\.)"), ""),
)
_LAYER = re.compile(r"^layers\.(\d+)\.")


def text_encoder_map(stored: Mapping[str, TensorSource], config: QwenConfig) -> TensorMap:
    """Our names for transformers' own, and what of the checkpoint stays unread.

    stored: every tensor of the files under its own name, with what makes a parameter of it.
    """
    sources: dict[str, TensorSource] = {}
    unused: set[str] = set()
    for name, source in stored.items():
        ours = _renamed(name)
        layer = _LAYER.match(ours)
        behind = layer is not None and int(layer[1]) >= config.used_layers
        if behind or ours == "norm.weight" or ours == "lm_head.weight":
            unused.add(name)
        else:
            sources[ours] = source
    return TensorMap(sources, frozenset(unused))


def _renamed(name: str) -> str:
    for pattern, ours in _PREFIXES:
        name = pattern.sub(ours, name)
    return name
