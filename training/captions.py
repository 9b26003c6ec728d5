"""Captions to WordPiece ids, as the conditioner of h3-mini takes them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import BertWordPieceTokenizer

MAX_TOKENS = 32


class Tokenizer:
    """Lower-case BERT WordPiece over vocab.txt, without [CLS] and [SEP], padded with 0."""

    def __init__(self, vocab: str | Path):
        pieces = Path(vocab).read_text().splitlines()
        self.wordpiece = BertWordPieceTokenizer(
            vocab={piece: i for i, piece in enumerate(pieces)}, lowercase=True
        )

    def __call__(self, captions: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids int64 [B, 32] and lengths int64 [B]. Raises ValueError for a caption that does not fit."""
        encoded = self.wordpiece.encode_batch(list(captions), add_special_tokens=False)
        lengths = np.array([len(encoding) for encoding in encoded], dtype=np.int64)
        if lengths.size and lengths.max() > MAX_TOKENS:
            longest = captions[int(lengths.argmax())]
            raise ValueError(
                f"{longest!r}: {lengths.max()} WordPieces, at most {MAX_TOKENS} fit. Shorten it."
            )
        ids = np.zeros((len(encoded), MAX_TOKENS), dtype=np.int64)
        for row, encoding in zip(ids, encoded, strict=True):
            row[: len(encoding)] = encoding.ids
        return ids, lengths
