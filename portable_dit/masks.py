"""Attention masks as data. A kernel's adapter makes of them what its library wants (inverted, packed).

Letters: B batch, S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NoMask:
    """Every row sees every row."""

    kind = "none"


@dataclass(frozen=True)
class Causal:
    """Row i sees rows 0..i, aligned at the last row when there are more keys than queries."""

    kind = "causal"


@dataclass(frozen=True)
class KeyPadding:
    """keep: bool [B, S]; True keys are seen by every row, False keys by none."""

    keep: Tensor
    kind = "key_padding"


@dataclass(frozen=True)
class CausalWithFullSpans:
    """Causal, but rows inside a span also see the whole span (image tokens inside a causal text).

    spans: (start, stop) row ranges, one tuple for the whole batch.
    """

    spans: tuple[tuple[int, int], ...]
    kind = "causal_with_full_spans"


@dataclass(frozen=True)
class Segments:
    """Packed documents: row i sees only rows of its own segment.

    lengths: of each segment, on the host; offsets: int32 [num_segments + 1] cumulative, on the device. Both
    are carried because some libraries want host integers and others a device tensor.
    """

    lengths: tuple[int, ...]
    offsets: Tensor
    kind = "segments"


@dataclass(frozen=True)
class Part:
    """The rows are one part of a sequence that several devices share; `of` is the mask of the whole.

    lengths: rows of each part. index: which one this is. Keys beyond this part's own stand in front and are
    the same for every part (a prefix whose keys and values were kept). Only what splits the sequence makes
    and reads this kind; no kernel does.
    """

    of: Mask
    lengths: tuple[int, ...]
    index: int
    kind = "part"


Mask = NoMask | Causal | KeyPadding | CausalWithFullSpans | Segments | Part
NO_MASK = NoMask()


def to_keep(mask: Mask, rows_q: int, rows_k: int, device: torch.device) -> Tensor | None:
    """The mask as bool, True = keep, broadcastable to [B, N, rows_q, rows_k]; None when all is kept."""
    match mask:
        case NoMask():
            return None
        case KeyPadding(keep=keep):
            return keep[:, None, None, :]  # [B, 1, 1, S]
        case Causal():
            return _causal(rows_q, rows_k, device)  # [Sq, Sk]
        case CausalWithFullSpans(spans=spans):
            keep = _causal(rows_q, rows_k, device)
            shift = rows_k - rows_q
            for start, stop in spans:
                keep[max(start - shift, 0) : max(stop - shift, 0), start:stop] = True
            return keep  # [Sq, Sk]
        case Segments(offsets=offsets):
            row = torch.arange(rows_k, device=device)
            segment = torch.bucketize(row, offsets.to(device), right=True)
            return segment[rows_k - rows_q :, None] == segment[None, :]  # [Sq, Sk]
        case Part():
            raise AssertionError("a part of a sequence has no mask without the rest")


def _causal(rows_q: int, rows_k: int, device: torch.device) -> Tensor:
    last = torch.arange(rows_k - rows_q, rows_k, device=device)
    return torch.arange(rows_k, device=device)[None, :] <= last[:, None]
