"""Masks as a list of plain attention calls.

Kernels of matrix units take no mask but "all" and "causal". Every mask of masks.py whose shape is known on
the host is a handful of such calls over row ranges, exactly: nothing is added to scores, no row is computed
twice, and no mask of [S, S] is ever made.

Letters: rows of queries stand at the end of the keys, so query i sits at key i + (Sk - Sq).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from portable_dit.masks import Causal, CausalWithFullSpans, Mask, NoMask, Segments


@dataclass(frozen=True)
class Piece:
    """Queries [start, stop) over keys [first, last); causal: aligned at the last row of both."""

    start: int
    stop: int
    first: int
    last: int
    causal: bool = False


def pieces(mask: Mask, rows_q: int, rows_k: int) -> list[Piece]:
    """The calls that make up a mask, in order of rows. A query row in none of them sees nothing."""
    shift = rows_k - rows_q
    match mask:
        case NoMask():
            found = [Piece(0, rows_q, 0, rows_k)]
        case Causal():
            found = list(_causal(0, rows_k))
        case CausalWithFullSpans(spans=spans):
            found = list(_prefixes(spans, rows_k))
        case Segments(lengths=lengths):
            ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
            found = [Piece(end - n, end, end - n, end) for end, n in zip(ends, lengths, strict=True)]
        case _:
            raise AssertionError(f"{mask.kind} lies on the device and makes no pieces")
    if isinstance(mask, NoMask):
        return found
    return [piece for piece in (_shifted(piece, shift) for piece in found) if piece is not None]


def _causal(start: int, stop: int) -> Iterator[Piece]:
    if start < stop:
        yield Piece(start, stop, 0, stop, causal=True)


def _prefixes(spans: tuple[tuple[int, int], ...], rows: int) -> Iterator[Piece]:
    """Every row sees a prefix of the keys: up to itself, or up to the last end of the spans that hold it."""
    inside = [(a, min(b, rows)) for a, b in spans if a < min(b, rows)]
    cuts = sorted({0, rows, *(edge for span in inside for edge in span)})
    ends = [max((b for a, b in inside if a <= cut < b), default=None) for cut in cuts[:-1]]
    start = 0
    for index, end in enumerate(ends):
        if index + 1 < len(ends) and ends[index + 1] == end:
            continue  # the next stretch sees the same keys
        stop = cuts[index + 1]
        if end is None:
            yield from _causal(start, stop)
        else:
            yield Piece(start, stop, 0, end)
        start = stop


def _shifted(piece: Piece, shift: int) -> Piece | None:
    """The piece in query rows, without those that are not asked for; a causal one keeps its alignment."""
    start, stop = max(piece.start - shift, 0), piece.stop - shift
    if start >= stop:
        return None
    return Piece(start, stop, piece.first, piece.last, piece.causal)
