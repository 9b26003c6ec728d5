"""e4m3 as gfx942 has it: the same bits mean half as much, and the bits of -0 mean NaN."""

from __future__ import annotations

import torch
from torch import Tensor

NEGATIVE_ZERO = 0x80


def to_fnuz(values: Tensor) -> Tensor:
    """e4m3fn values with their bits kept, as e4m3fnuz; a scale beside them must be doubled. -0 becomes 0."""
    bits = values.view(torch.uint8)
    return torch.where(bits == NEGATIVE_ZERO, 0, bits).to(torch.uint8).view(torch.float8_e4m3fnuz)
