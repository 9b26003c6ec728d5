"""PNG files by hand: with sizes that they do not have, and pixels that Pillow does not write."""

from __future__ import annotations

import struct
import zlib


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


NOTHING = zlib.compress(b"")


def png_file(width: int, height: int, packed: bytes = NOTHING, *, depth: int = 8) -> bytes:
    """An RGB file that claims that size, whatever its compressed rows hold. depth: bits of a value."""
    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", packed), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
