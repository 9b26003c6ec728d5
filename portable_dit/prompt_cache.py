"""Text states of earlier requests, kept on the host so that the same prompt is not read twice.

A big text encoder takes as long as a few steps, and longer when it has to come to the device first. What
decides its states is the prompt and the pixels of the references, so they are the key, with who made them.
The least recently used states go when the bytes are spent.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from portable_dit.trees import mapped, tensors_of


class PromptCache:
    """Results of a text encoder by content. max_bytes: of all that is kept; 0 keeps nothing.

    encoder: what tells this encoder from others (model, weights, number formats, kernels).
    """

    def __init__(self, max_bytes: int, encoder: str) -> None:
        self.max_bytes = max_bytes
        self.encoder = encoder
        self._kept: OrderedDict[str, tuple[Any, int]] = OrderedDict()

    @property
    def kept_bytes(self) -> int:
        """Bytes of everything that is kept now."""
        return sum(size for _, size in self._kept.values())

    def find(self, prompt: str, references: Sequence[np.ndarray]) -> Any | None:
        """What the encoder gave for this content, on the host; None when that is not kept."""
        key = self._key(prompt, references)
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def keep(self, prompt: str, references: Sequence[np.ndarray], states: Any) -> None:
        """Keeps a copy, unless it alone is over the limit."""
        size = sum(tensor.nbytes for tensor in tensors_of(states))
        if size > self.max_bytes:
            return
        self._kept[self._key(prompt, references)] = (mapped(states, lambda t: t.to("cpu", copy=True)), size)
        while self.kept_bytes > self.max_bytes:
            self._kept.popitem(last=False)

    def _key(self, prompt: str, references: Sequence[np.ndarray]) -> str:
        digest = hashlib.sha256()
        for part in (self.encoder.encode(), prompt.encode()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        for picture in references:
            digest.update(repr(picture.shape).encode())
            digest.update(np.ascontiguousarray(picture).tobytes())
        return digest.hexdigest()
