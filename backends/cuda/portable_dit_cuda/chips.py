"""What a chip can do, from its compute capability and its name: data and pure functions, no torch.

Rates are dense and from the vendor's data sheets (H200, H100, A100, L40S, RTX 4090 and 5090, B200), TFLOP/s;
they serve predictions only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from portable_dit.capabilities import Capabilities, Reject

Capability = tuple[int, int]

# A context with its libraries loaded, as `nvidia-smi` shows it for a process that multiplied two matrices.
RUNTIME_BYTES = 700 * 2**20


@dataclass(frozen=True)
class Rates:
    """TFLOP/s by dtype or format, and bytes per second of device memory."""

    compute: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float | None = None


def _rates(bfloat16: float, fp8: float, int8: float, bandwidth: float) -> Rates:
    compute = {"bfloat16": bfloat16, "int8_row": int8}
    return Rates(compute | ({"fp8_row": fp8} if fp8 else {}), bandwidth)


# The first name that the device's own name contains.
RATES: Mapping[str, Rates] = {
    "B200": _rates(2250, 4500, 4500, 8.0e12),
    "H200": _rates(989, 1979, 1979, 4.8e12),
    "H100 PCIe": _rates(756, 1513, 1513, 2.0e12),
    "H100": _rates(989, 1979, 1979, 3.35e12),
    "A100": _rates(312, 0, 624, 1.94e12),
    "L40S": _rates(362, 733, 733, 0.864e12),
    "RTX 5090": _rates(210, 419, 838, 1.79e12),
    "RTX 4090": _rates(165, 330, 661, 1.01e12),
}


def rates(name: str) -> Rates:
    """The data sheet's rates of a device; empty when it is not in the table."""
    return next((found for part, found in RATES.items() if part in name), Rates())


def arch_name(capability: Capability) -> str:
    """(9, 0) -> "sm_90"."""
    return f"sm_{capability[0]}{capability[1]}"


def capability_of(capabilities: Capabilities) -> Capability:
    """The compute capability that a device's `arch` names: "sm_90" -> (9, 0), "sm_120" -> (12, 0)."""
    digits = capabilities.device.arch.removeprefix("sm_")
    return int(digits[:-1]), int(digits[-1])


def dtypes(capability: Capability) -> frozenset[str]:
    """Activation types with matrix units for them."""
    return frozenset({"float32", "float16"} | ({"bfloat16"} if capability >= (8, 0) else set()))


def native_formats(capability: Capability, toolkit: tuple[int, int]) -> frozenset[str]:
    """Formats that the matrix units of such a chip take through torch built with that CUDA version."""
    found = set()
    if capability >= (8, 0):
        found.add("int8_row")
    if capability >= (8, 9):
        found |= {"fp8_row", "fp8_tensor"}
    if capability == (9, 0) and toolkit >= (12, 9):
        found.add("fp8_block128")
    if capability >= (10, 0) and toolkit >= (12, 8):
        found.add("mxfp8")
    return frozenset(found)


def refuse_library(name: str, capabilities: Capabilities) -> Reject | None:
    """Why an optional kernel library cannot be used on the machine, or None."""
    if name in capabilities.libraries:
        return None
    return Reject(
        "library",
        f"{name} is not installed or failed its probe; `python -m portable_dit_cuda` says which and why",
    )
