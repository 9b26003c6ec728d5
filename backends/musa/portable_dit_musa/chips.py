"""What a chip can do, from its architecture's name: data and pure functions, no torch.

MTT S80 and S3000 are mp_21, S4000 is mp_22, S5000 is mp_31. Limits: torch_musa 2.7.1 and MATE's sources.
"""

from __future__ import annotations

from portable_dit.capabilities import Capabilities, Reject

Version = tuple[int, int]

RUNTIME_BYTES = 800 * 2**20  # runtime and muDNN, before the first tensor
FLASH_FROM: Version = (2, 2)  # muDNN's attention, bfloat16, and mccl
FP8_FROM: Version = (3, 1)  # fp8 products and MATE
MAX_LIVE_GRAPHS = 1900  # a process can hold about 2048 captured graphs; the rest is a reserve
MATE = "mate"


def arch_name(capability: Version) -> str:
    """(3, 1) -> "mp_31"."""
    return f"mp_{capability[0]}{capability[1]}"


def version_of(arch: str) -> Version:
    """ "mp_31" -> (3, 1)."""
    digits = arch.removeprefix("mp_")
    return int(digits[:-1]), int(digits[-1])


def dtypes(arch: str) -> frozenset[str]:
    """Activation types that the matrix units take, and float32."""
    return frozenset({"float32", "float16"} | ({"bfloat16"} if version_of(arch) >= FLASH_FROM else set()))


def native_formats(arch: str, libraries: frozenset[str]) -> frozenset[str]:
    """Formats that the matrix units take through torch, or through MATE."""
    if version_of(arch) < FP8_FROM:
        return frozenset()
    return frozenset({"fp8_row", "fp8_tensor"} | ({"fp8_block128"} if MATE in libraries else set()))


def refuse_arch(arch: str, least: Version) -> Reject | None:
    """Why a chip is too old, or None."""
    if version_of(arch) >= least:
        return None
    return Reject("arch", f"needs {arch_name(least)} or newer, this is {arch}")


def refuse_mate(capabilities: Capabilities) -> Reject | None:
    """Why MATE cannot be used on the machine, or None."""
    if MATE in capabilities.libraries:
        return None
    return Reject(
        "library",
        "MATE is not installed or failed its probe; `python -m portable_dit_musa` says which and why",
    )
