"""What runs here: each optional kernel library is called once on the device and compared with plain torch.

`aiter` on the Python index is another package, and kernels are compiled at their first call, for chips that
may not be this one. That first call of AITER takes minutes and is kept on disk; whoever draws with it would
wait for it in any case.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec

import torch

from portable_dit.probing import Probe, attention_fault, probe
from portable_dit_rocm.attention import AITER_ATTENTION, FLASH_ATTN, FlashAttention
from portable_dit_rocm.chips import AITER

log = logging.getLogger("portable_dit")


@cache
def probe_libraries(index: int, arch: str) -> dict[str, Probe]:
    """Every optional library by name. Calls the device, so the first time takes seconds, or minutes."""
    return {
        "aiter": _probe(AITER_ATTENTION, "aiter", ("amd-aiter", "aiter"), AITER, index, arch),
        "flash-attn": _probe(FLASH_ATTN, "flash_attn", ("flash-attn",), (), index, arch),
    }


def _probe(
    kernel: FlashAttention,
    module: str,
    distributions: tuple[str, ...],
    archs: tuple[str, ...],
    index: int,
    arch: str,
) -> Probe:
    if find_spec(module) is None:
        return Probe(None, f"not installed; {arch} runs on torch's own attention")
    if archs and arch not in archs:
        return Probe(None, f"has no kernels for {arch}")
    log.info("probing %s, which compiles its kernels at the first call", module)
    return probe(distributions, lambda: attention_fault(kernel, torch.device("cuda", index)))
