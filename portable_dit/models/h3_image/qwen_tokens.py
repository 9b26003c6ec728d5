"""A prompt and its references as token ids, tags and positions of Qwen3-VL, and as patches of its tower.

For each reference, in the order of the request: the label "<Picture i>: ", then a mark, one pad for each row
of the vision tower, and a mark; behind all of them the prompt. Labels and prompt are tokenised each on its
own and joined as ids, so that no token spans a border. No chat template, no special tokens.

Letters: L tokens, P patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from portable_dit.errors import RequestError, WeightsError
from portable_dit.models.h3_image.config_json import read_json
from portable_dit.models.h3_image.qwen_config import QwenConfig
from portable_dit.models.h3_image.text import IMAGE_TAG, TEXT_TAG

TOKENIZER_FOLDERS = ("tokenizer", "processor", "text_encoder")
TOKENIZER_FILE = "tokenizer.json"


class QwenTokenizer:
    """Byte pairs of text as it is written. A special token spelt out in a prompt is ordinary characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True

    @classmethod
    def from_checkpoint(cls, folder: Path) -> QwenTokenizer:
        """The tokenizer of a checkpoint, from the first folder that holds one."""
        places = [folder / name / TOKENIZER_FILE for name in TOKENIZER_FOLDERS]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            known = ", ".join(f"{name}/{TOKENIZER_FILE}" for name in TOKENIZER_FOLDERS)
            raise WeightsError(
                f"{folder}: no tokenizer; looked for {known}. The text encoder needs it; is the download "
                "complete?"
            )
        read_json(found)  # a file cut short is told as one; the library has no error class of its own
        return cls(Tokenizer.from_file(str(found)))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


@dataclass(frozen=True)
class Presentation:
    """What the encoder reads.

    ids, tags: int64 [L]; tags are the transformer's own, 0 for a picture's marks and all between them. pads:
    bool [L], where rows of the vision tower go. grids: how many of them each reference has, (down, across).
    """

    ids: Tensor
    tags: Tensor
    pads: Tensor
    grids: tuple[tuple[int, int], ...]

    @property
    def positions(self) -> Tensor:
        """(t, h, w) of every token: int64 [3, L].

        Text counts up on all three. A picture's rows keep one t and count down and across from it; what comes
        behind goes on after the longer side.
        """
        runs, here, cursor, grids = [], 0, 0, iter(self.grids)
        pads = self.pads.tolist()
        while here < len(pads):
            stop = here
            while stop < len(pads) and pads[stop] == pads[here]:
                stop += 1
            if pads[here]:
                down, across = next(grids)
                runs.append(_grid(down, across) + cursor)
                cursor += max(down, across)
            else:
                runs.append(torch.arange(stop - here).expand(3, -1) + cursor)
                cursor += stop - here
            here = stop
        return torch.cat(runs, dim=1)


def present(
    prompt: str, sizes: Sequence[tuple[int, int]], tokenizer: QwenTokenizer, config: QwenConfig
) -> Presentation:
    """The presentation of a prompt with references.

    sizes: (width, height) of each as the vision tower sees it. Raises RequestError when nothing is left of
    the prompt, or too much.
    """
    ids: list[int] = []
    tags: list[int] = []
    side = config.vision.row_side
    grids = tuple((height // side, width // side) for width, height in sizes)
    for number, (down, across) in enumerate(grids, 1):
        label = tokenizer.encode(f"<Picture {number}>: ")
        pads = [config.image_token_id] * (down * across)
        block = [config.vision_start_token_id, *pads, config.vision_end_token_id]
        ids += [*label, *block]
        tags += [TEXT_TAG] * len(label) + [IMAGE_TAG] * len(block)
    words = tokenizer.encode(prompt)
    if not words:
        raise RequestError(f"prompt {prompt!r}: holds no words. Say what to draw.")
    ids += words
    tags += [TEXT_TAG] * len(words)
    if len(ids) > config.max_tokens:
        raise RequestError(
            f"prompt of {len(words):,} tokens, and {len(ids) - len(words):,} for {len(grids)} references: "
            f"this model takes at most {config.max_tokens:,} in all. Shorten it, or leave references out."
        )
    tokens = torch.tensor(ids)
    return Presentation(tokens, torch.tensor(tags), tokens == config.image_token_id, grids)


def patches(picture: np.ndarray, config: QwenConfig) -> Tensor:
    """A picture uint8 RGB [H, W, 3] as the vision tower takes it: float32 [P, values].

    values: channels * time * patch * patch. Patches that make one row of the text stand together. The tower's
    kernels span `temporal_patch_size` frames, so a still picture is given that often.
    """
    vision, wanted = config.vision, config.vision_size(picture.shape[1], picture.shape[0])
    if (picture.shape[1], picture.shape[0]) != wanted:
        picture = _resized(picture, wanted)
    mean, std = (
        torch.tensor(v)[:, None, None] for v in (config.processor.image_mean, config.processor.image_std)
    )
    x = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255  # [C, H, W]
    x = (x - mean) / std
    patch, merge = vision.patch_size, vision.merge_size
    rows, columns = x.shape[1] // vision.row_side, x.shape[2] // vision.row_side
    x = x.reshape(-1, rows, merge, patch, columns, merge, patch)
    x = x.permute(1, 4, 2, 5, 0, 3, 6)  # [rows, columns, merge, merge, C, patch, patch]
    x = x.unsqueeze(5).expand(-1, -1, -1, -1, -1, vision.temporal_patch_size, -1, -1)
    return x.reshape(rows * columns * merge**2, -1)  # [P, C * time * patch * patch]


def _resized(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC))


def _grid(down: int, across: int) -> Tensor:
    """(0, row, column) of every cell: int64 [3, down * across]."""
    h, w = torch.meshgrid(torch.arange(down), torch.arange(across), indexing="ij")
    return torch.stack([torch.zeros_like(h), h, w]).flatten(1)
