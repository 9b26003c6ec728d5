"""From a prompt to the tokens that a text encoder reads, and why it could not. Torch-free.

So a prompt that is too long, or holds no words, is refused with the other mistakes of a request, before
weights are read. The small encoder reads word pieces. The big one reads byte pairs and, for each reference in
the order of the request, the label "<Picture i>: ", then a mark, one pad for each row of the vision tower,
and a mark; behind all of them the prompt. Labels and prompt are tokenised each on its own and joined as ids,
so that no token spans a border. No chat template, no special tokens.

Letters: L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from portable_dit.errors import RequestError, WeightsError
from portable_dit.models.config_json import read_json
from portable_dit.models.h3_image.config import H3Config, TextConfig
from portable_dit.models.h3_image.qwen_config import QwenConfig

IMAGE_TAG, TEXT_TAG = 0, 1
UNKNOWN = "[UNK]"
TOKENIZER_FOLDERS = ("tokenizer", "processor", "text_encoder")
TOKENIZER_FILE = "tokenizer.json"


def prompt_problem(prompt: str, reference_sizes: Sequence[tuple[int, int]], config: H3Config) -> str | None:
    """Why the text encoder of a checkpoint cannot take this prompt; None when it can, or is not here.

    reference_sizes: (width, height) of each reference as the transformer takes it. Raises WeightsError when
    the checkpoint has no tokenizer, or a damaged one.
    """
    text = config.text
    if config.folder is None:
        return None
    try:
        if isinstance(text, QwenConfig):
            sizes = [text.vision_size(*size) for size in reference_sizes]
            present(prompt, sizes, QwenTokenizer.from_checkpoint(config.folder), text)
        else:
            words = WordPiece.from_folder(config.folder / "text_encoder")
            piece_ids(prompt, len(reference_sizes), words, text)
    except RequestError as error:
        return str(error)
    return None


class WordPiece:
    """Word pieces of lower-cased text. No special tokens: "[SEP]" in a prompt is five ordinary characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: Path) -> WordPiece:
        """The tokenizer of a text encoder's folder, from its vocab.txt. Raises WeightsError."""
        vocab = folder / "vocab.txt"
        if not vocab.is_file():
            raise WeightsError(
                f"{vocab}: missing. The text encoder needs its word list; is the checkpoint complete?"
            )
        return cls(_read_word_list(vocab, _version(vocab)))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


class QwenTokenizer:
    """Byte pairs of text as it is written. A special token spelt out in a prompt is ordinary characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True

    @classmethod
    def from_checkpoint(cls, folder: Path) -> QwenTokenizer:
        """The tokenizer of a checkpoint, from the first folder that holds one. Raises WeightsError."""
        places = [folder / name / TOKENIZER_FILE for name in TOKENIZER_FOLDERS]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            known = ", ".join(f"{name}/{TOKENIZER_FILE}" for name in TOKENIZER_FOLDERS)
            raise WeightsError(
                f"{folder}: no tokenizer; looked for {known}. The text encoder needs it; is the download "
                "complete?"
            )
        return cls(_read_tokenizer(found, _version(found)))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def piece_ids(prompt: str, num_references: int, tokenizer: WordPiece, config: TextConfig) -> list[int]:
    """What the small encoder reads: the labels, if it has any, and the prompt.

    Raises RequestError when nothing is left of the prompt, or too much.
    """
    labels: list[int] = []
    if config.picture_labels:
        for number in range(1, num_references + 1):
            labels += tokenizer.encode(_label(number))
    words = _words_of(prompt, tokenizer, config.vocab_size)
    count, limit = len(labels) + len(words), config.max_tokens
    if count > limit:
        raise RequestError(
            f"prompt of {count} tokens ({len(prompt)} characters): this model takes at most {limit}. "
            f"Shorten it to about {limit * 3 // 4} words."
        )
    return labels + words


@dataclass(frozen=True, eq=False)
class Presentation:
    """What the big encoder reads.

    ids, tags: int64 [L]; tags are the transformer's own, 0 for a picture's marks and all between them. pads:
    bool [L], where rows of the vision tower go. grids: how many of them each reference has, (down, across).
    """

    ids: np.ndarray
    tags: np.ndarray
    pads: np.ndarray
    grids: tuple[tuple[int, int], ...]

    @property
    def positions(self) -> np.ndarray:
        """(t, h, w) of every token: int64 [3, L].

        Text counts up on all three. A picture's rows keep one t and count down and across from it; what comes
        behind goes on after the longer side.
        """
        runs, here, cursor, grids = [], 0, 0, iter(self.grids)
        borders = [*(np.flatnonzero(np.diff(self.pads)) + 1), len(self.pads)]
        for stop in borders:
            if self.pads[here]:
                down, across = next(grids)
                runs.append(_grid(down, across) + cursor)
                cursor += max(down, across)
            else:
                runs.append(np.broadcast_to(np.arange(stop - here), (3, stop - here)) + cursor)
                cursor += int(stop) - here
            here = int(stop)
        return np.concatenate(runs, axis=1)


def present(
    prompt: str, sizes: Sequence[tuple[int, int]], tokenizer: QwenTokenizer, config: QwenConfig
) -> Presentation:
    """What the big encoder reads of a prompt with references.

    sizes: (width, height) of each as the vision tower sees it. Raises RequestError when nothing is left of
    the prompt, or too much.
    """
    ids: list[int] = []
    tags: list[int] = []
    side = config.vision.row_side
    grids = tuple((height // side, width // side) for width, height in sizes)
    for number, (down, across) in enumerate(grids, 1):
        label = tokenizer.encode(_label(number))
        pads = [config.image_token_id] * (down * across)
        block = [config.vision_start_token_id, *pads, config.vision_end_token_id]
        ids += [*label, *block]
        tags += [TEXT_TAG] * len(label) + [IMAGE_TAG] * len(block)
    words = _words_of(prompt, tokenizer, config.vocab_size)
    ids += words
    tags += [TEXT_TAG] * len(words)
    if len(ids) > config.max_tokens:
        references = "1 reference" if len(grids) == 1 else f"{len(grids)} references"
        raise RequestError(
            f"prompt of {len(words):,} tokens, and {len(ids) - len(words):,} for {references}: "
            f"this model takes at most {config.max_tokens:,} in all. Shorten it, or leave references out."
        )
    tokens = np.array(ids)
    return Presentation(tokens, np.array(tags), tokens == config.image_token_id, grids)


def _label(number: int) -> str:
    return f"<Picture {number}>: "


def _words_of(prompt: str, tokenizer: WordPiece | QwenTokenizer, vocab_size: int) -> list[int]:
    words = tokenizer.encode(prompt)
    if not words:
        raise RequestError(f"prompt {prompt!r}: holds no words. Say what to draw.")
    if max(words) >= vocab_size:
        raise WeightsError(
            f"the tokenizer has a token {max(words)}, the text encoder's table {vocab_size} rows "
            "(vocab_size): they belong to different checkpoints. Use the files of one and the same."
        )
    return words


def _grid(down: int, across: int) -> np.ndarray:
    """(0, row, column) of every cell: int64 [3, down * across]."""
    h, w = np.divmod(np.arange(down * across), across)
    return np.stack([np.zeros_like(h), h, w])


def _version(file: Path) -> tuple[int, int]:
    """What tells a file from what was there before: a tokenizer takes up to a second to read, each prompt
    is looked at before loading, and the model wants it once more.
    """
    status = file.stat()
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=2)
def _read_word_list(vocab: Path, version: tuple[int, int]) -> Tokenizer:
    try:
        lines = vocab.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except PermissionError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise WeightsError(f"{vocab}: not readable as UTF-8 text ({error}). Restore it.") from error
    words = {word: index for index, word in enumerate(lines)}
    if UNKNOWN not in words:
        raise WeightsError(
            f"{vocab}: holds {len(words)} words and no {UNKNOWN}, which stands for unknown ones. "
            "Restore it from the checkpoint."
        )
    tokenizer = Tokenizer(tokenizer_models.WordPiece(words, unk_token=UNKNOWN))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    return tokenizer


@lru_cache(maxsize=2)
def _read_tokenizer(file: Path, version: tuple[int, int]) -> Tokenizer:
    read_json(file)  # a file cut short is told as one
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no error class of its own
        raise WeightsError(f"{file}: not a tokenizer ({error}). Restore it from the checkpoint.") from error
