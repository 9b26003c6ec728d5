"""What a chip can do, from its architecture's name: data and pure functions, no torch.

Number formats: hipBLASLt, "Data type support", and pytorch aten/src/ATen/native/cuda/ScaledBlas.cpp, read
2026-11-30. Rates are dense and from the vendor's data sheets, TFLOP/s; they serve predictions only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from portable_dit.capabilities import Capabilities, Reject

RUNTIME_BYTES = 800 * 2**20  # runtime, hipBLASLt and AOTriton, before the first tensor
FNUZ = ("gfx942",)  # whose e4m3 has no negative zero and one exponent more: half of what the bits mean
E4M3 = ("gfx950", "gfx1200", "gfx1201")
BLOCKS_OF_32 = ("gfx950",)
AITER = ("gfx942", "gfx950")  # the chips that its prebuilt kernels are for


@dataclass(frozen=True)
class Rates:
    """TFLOP/s by dtype or format, and bytes per second of device memory."""

    compute: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float | None = None


# The first name that the device's own name contains.
RATES: Mapping[str, Rates] = {
    "MI355X": Rates({"bfloat16": 2516, "fp8_row": 5033}, 8.0e12),
    "MI350X": Rates({"bfloat16": 2307, "fp8_row": 4614}, 8.0e12),
    "MI325X": Rates({"bfloat16": 1307, "fp8_row": 2615}, 6.0e12),
    "MI300X": Rates({"bfloat16": 1307, "fp8_row": 2615}, 5.3e12),
    "MI250X": Rates({"bfloat16": 383}, 3.2e12),
}


def rates(name: str) -> Rates:
    """The data sheet's rates of a device; empty when it is not in the table."""
    return next((found for part, found in RATES.items() if part in name), Rates())


def arch_name(gcn_arch: str) -> str:
    """The chip in what the driver calls it: "gfx942:sramecc+:xnack-" -> "gfx942"."""
    return gcn_arch.split(":")[0]


def native_formats(arch: str, libraries: frozenset[str]) -> frozenset[str]:
    """Formats that the matrix units take through torch, or through one of these libraries."""
    found = set()
    if arch in (*FNUZ, *E4M3):
        found |= {"fp8_row", "fp8_tensor"}
    if arch in BLOCKS_OF_32:
        found.add("mxfp8")
    if "aiter" in libraries and arch in AITER:
        found |= {"fp8_block128", "int8_row"}
    return frozenset(found)


def refuse_library(name: str, capabilities: Capabilities) -> Reject | None:
    """Why an optional kernel library cannot be used on the machine, or None."""
    if name in capabilities.libraries:
        return None
    return Reject(
        "library",
        f"{name} is not installed or failed its probe; `python -m portable_dit_rocm` says which and why",
    )
