"""Whether MATE runs here: it is called once on the device and compared with plain torch.

The package `mate` on the Python index is another one; and this one's kernels are for mp_31 alone.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from portable_dit.probing import Probe, attention_fault, probe
from portable_dit_musa.attention import MATE_ATTENTION
from portable_dit_musa.chips import FP8_FROM, MATE, arch_name, version_of


@cache
def probe_mate(index: int, arch: str) -> Probe:
    """MATE by a small call. Compiles kernels the first time."""
    if version_of(arch) < FP8_FROM:
        return Probe(None, f"its kernels are for {arch_name(FP8_FROM)}")
    if find_spec(MATE) is None:
        return Probe(None, "not installed; it is built from github.com/MooreThreads/mate")
    return probe((MATE,), lambda: attention_fault(MATE_ATTENTION, torch.device("musa", index)))
