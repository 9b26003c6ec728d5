"""Files of a made-up checkpoint that are no tensors: a tokenizer that knows bytes, a processor's config.

Real checkpoints bring a tokenizer of 150,000 words; one of single bytes is enough to walk the same path.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

from portable_dit.models.h3_image.qwen_config import QwenConfig
from portable_dit.models.h3_image.tokens import TOKENIZER_FILE


def write_qwen_files(root: Path, config: QwenConfig) -> None:
    """tokenizer/tokenizer.json and processor/preprocessor_config.json of a checkpoint in `root`."""
    (root / "tokenizer").mkdir(parents=True, exist_ok=True)
    byte_tokenizer(config).save(str(root / "tokenizer" / TOKENIZER_FILE))
    (root / "processor").mkdir(exist_ok=True)
    text = json.dumps(config.processor_dict(), indent=2)
    (root / "processor" / "preprocessor_config.json").write_text(text + "\n")


def byte_tokenizer(config: QwenConfig) -> Tokenizer:
    """A token for every byte, and the three marks of pictures at the ids that the config gives them."""
    marks = {
        "<|vision_start|>": config.vision_start_token_id,
        "<|vision_end|>": config.vision_end_token_id,
        "<|image_pad|>": config.image_token_id,
    }
    letters = {letter: place for place, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**letters, **marks}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return tokenizer
