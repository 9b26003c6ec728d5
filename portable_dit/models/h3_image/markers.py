"""How re-packed checkpoints of this family say in which form a layer's weight is stored. Torch-free.

Each quantised layer X has a short row of bytes `X.comfy_quant` beside its weight: JSON with the format, and
whether neighbouring in features were rotated together before rounding (INT8-ConvRot, arXiv 2512.03673).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from portable_dit.errors import WeightsError

MARKER = ".comfy_quant"
ROTATED_CHANNELS = 256
INT8, FP8, W4A8 = "int8_tensorwise", "float8_e4m3fn", "asym_w4a8_int8"


@dataclass(frozen=True)
class Marker:
    """What a layer's marker says. rotated: in features that were rotated together, 0 = none were."""

    format: str
    rotated: int


def read_marker(name: str, text: bytes) -> Marker:
    """The marker in a tensor's bytes. Raises WeightsError for a form that cannot be read."""
    try:
        fields: Any = json.loads(bytes(text).rstrip(b"\0"))
        fields = {**fields, **(fields.get("params") or {})}
        form = fields["format"]
        rotated = int(fields.get("convrot_groupsize", ROTATED_CHANNELS)) if fields.get("convrot") else 0
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"{name}: its text {bytes(text)[:80]!r} does not name a format. Download the file again."
        ) from error
    if form not in (INT8, FP8, W4A8):
        raise WeightsError(
            f"{name}: format {form!r} is not read. Known: {INT8}, {FP8}, {W4A8}. Use a file in one of these, "
            "or the original or diffusers files."
        )
    if rotated and (rotated < 0 or rotated & (rotated - 1) or rotated.bit_length() % 2 == 0):
        raise WeightsError(
            f"{name}: rotates {rotated} channels together: there must be a power of four. "
            "Use a file with convrot_groupsize 256."
        )
    return Marker(form, rotated)
