"""PNG at memory speed: pixels in, file bytes out.

Pillow spends seconds on a 4096x4096 picture, nearly all of it in one zlib stream on one core. PNG allows
better: rows are cut into bands, each band is filtered by numpy and deflated by ISA-L on its own thread, and
the raw deflate streams are joined at byte boundaries (sync flush), which any decoder reads as one stream.
The checksum of the whole is combined from those of the bands. `docs/benchmarks/png.md` has the figures and
what else was measured.

Letters: H W pixels.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

Bytes2D = npt.NDArray[np.uint8]

SIGNATURE = b"\x89PNG\r\n\x1a\n"
NONE, SUB, UP = 0, 1, 2  # filter types of the PNG specification, section 9
# Large enough that a band's cold dictionary costs under 0.2 %, small enough that 2048x2048 keeps a dozen
# threads busy.
BAND_BYTES = 1 << 20
LEVEL = 1
ADLER_MODULUS = 65521


@dataclass(frozen=True)
class Band:
    """Deflated rows, with what is needed to join their checksum to that of the rows before."""

    deflated: tuple[bytes, ...]
    adler: int
    raw_bytes: int


def encode_png(
    pixels: Bytes2D, text: Mapping[str, str] | None = None, *, threads: int | None = None
) -> bytes:
    """A PNG file holding the pixels exactly, and the text as standard chunks before them.

    pixels: uint8 RGB [H, W, 3]. threads: None means the cores this process may use.
    Raises ValueError for another shape or dtype, or an empty picture.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.size == 0:
        raise ValueError(f"pixels of {pixels.dtype} {list(pixels.shape)}: PNG takes uint8 RGB [H, W, 3].")
    height, width, _ = pixels.shape
    rows = np.ascontiguousarray(pixels).reshape(height, width * 3)  # [H, W * 3]
    bands = _deflate(rows, threads or _usable_cores())

    chunks = [
        _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        _chunk(b"sRGB", b"\0"),
        *(_text_chunk(key, value) for key, value in (text or {}).items()),
        _chunk(b"IDAT", b"\x78\x01"),
        *(_chunk(b"IDAT", *band.deflated) for band in bands),
        _chunk(b"IDAT", struct.pack(">I", _joined_adler(bands))),
        _chunk(b"IEND"),
    ]
    return b"".join([SIGNATURE, *(piece for chunk in chunks for piece in chunk)])


def _deflate(rows: Bytes2D, threads: int) -> list[Band]:
    """All rows as bands in order; numpy and ISA-L both let other threads run meanwhile."""
    height, stride = rows.shape
    per_band = max(1, BAND_BYTES // (stride + 1))
    starts = list(range(0, height, per_band))

    def work(start: int) -> Band:
        stop = min(start + per_band, height)
        return _deflate_band(rows, start, stop, last=stop == height)

    if threads == 1 or len(starts) == 1:
        return [work(start) for start in starts]
    with ThreadPoolExecutor(min(threads, len(starts)), thread_name_prefix="png") as pool:
        return list(pool.map(work, starts))


def _deflate_band(rows: Bytes2D, start: int, stop: int, *, last: bool) -> Band:
    kind = _best_filter(rows, start, stop)
    filtered = _filtered(rows, start, stop, kind)
    deflater = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, -15)
    flush = isal_zlib.Z_FINISH if last else isal_zlib.Z_SYNC_FLUSH
    deflated = deflater.compress(filtered), deflater.flush(flush)
    return Band(deflated, isal_zlib.adler32(filtered), filtered.nbytes)


def _best_filter(rows: Bytes2D, start: int, stop: int) -> int:
    """The filter that makes a strip in the middle of the band smallest.

    The usual rule (least sum of absolute differences) chooses badly for flat drawings, where repeats count
    for more than small values; deflating a strip of the band asks the question itself.
    """
    strip = max(1, (stop - start) // 64)
    first = start + (stop - start - strip) // 2
    trials = {kind: _filtered(rows, first, first + strip, kind) for kind in (SUB, UP, NONE)}
    return min(trials, key=lambda kind: len(isal_zlib.compress(trials[kind], LEVEL)))


def _filtered(rows: Bytes2D, start: int, stop: int, kind: int) -> Bytes2D:
    """Rows start to stop as PNG stores them, [rows, 1 + W * 3]: the filter type, then bytes modulo 256."""
    out = np.empty((stop - start, 1 + rows.shape[1]), np.uint8)
    out[:, 0] = kind
    band, body = rows[start:stop], out[:, 1:]
    if kind == SUB:
        body[:, :3] = band[:, :3]
        np.subtract(band[:, 3:], band[:, :-3], out=body[:, 3:])
    elif kind == UP:
        body[0] = band[0] - rows[start - 1] if start else band[0]  # above the picture there is zero
        np.subtract(band[1:], band[:-1], out=body[1:])
    else:
        body[:] = band
    return out


def _joined_adler(bands: list[Band]) -> int:
    """Adler-32 of all rows from those of the bands (RFC 1950; the same algebra as zlib's adler32_combine)."""
    low, high = 1, 0
    for band in bands:
        high = (high + (band.adler >> 16) + band.raw_bytes * (low - 1)) % ADLER_MODULUS
        low = (low + (band.adler & 0xFFFF) - 1) % ADLER_MODULUS
    return high << 16 | low


def _chunk(kind: bytes, *body: bytes) -> list[bytes]:
    """A chunk in pieces: tens of megabytes are joined once, into the file."""
    crc = isal_zlib.crc32(kind)
    for piece in body:
        crc = isal_zlib.crc32(piece, crc)
    size = sum(len(piece) for piece in body)
    return [struct.pack(">I", size), kind, *body, struct.pack(">I", crc)]


def _text_chunk(key: str, value: str) -> list[bytes]:
    """tEXt where Latin-1 can hold the value, since every reader knows it, else iTXt in UTF-8."""
    name = key.encode("latin-1")
    try:
        return _chunk(b"tEXt", name + b"\0" + value.encode("latin-1"))
    except UnicodeEncodeError:
        return _chunk(b"iTXt", name + b"\0\0\0\0\0" + value.encode("utf-8", "replace"))


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
