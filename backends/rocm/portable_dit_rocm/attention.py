"""Attention from AITER and FlashAttention, and torch's own function pinned to one implementation.

All are called by keyword: positional order differs between packages and between versions. `window_size` is
never passed, since it has two entries in some versions of AITER and three in others.

Letters: B batch, S tokens, N heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend

from portable_dit.capabilities import AttentionRequest, Capabilities, Reject
from portable_dit.errors import BackendError
from portable_dit.masks import Mask, NoMask
from portable_dit.piecewise import (
    HALVES,
    MASKS_IN_PIECES,
    ChunkedAttention,
    PiecewiseAttention,
    SdpaAttention,
)
from portable_dit_rocm.chips import AITER, refuse_library

SOURCES = {"aiter": "github.com/ROCm/aiter", "flash_attn": "github.com/Dao-AILab/flash-attention"}


@cache
def library_function(module: str, name: str) -> Callable[..., Any]:
    """A function of a vendor library. A package of the same name on the Python index is another one."""
    try:
        found: Callable[..., Any] | None = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise  # it is installed, and something that it needs is not
        found = None
    if found is None:
        raise BackendError(f"{module} has no {name}; the library is built from {SOURCES[module]}.")
    return found


class FlashAttention(PiecewiseAttention):
    """A library's `flash_attn_func`, [B, S, N, D]. Its causal mask is aligned at the last key, as ours is.

    archs: chips that it has kernels for, None for all. lse_flag: the argument that asks for (out, lse, ...).
    """

    masks = MASKS_IN_PIECES
    gives_lse = True

    def __init__(
        self, id: str, library: str, module: str, *, archs: tuple[str, ...] | None, lse_flag: str
    ) -> None:
        self.id = id
        self._library = library
        self._module = module
        self._archs = archs
        self._lse_flag = lse_flag

    def refuse_further(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        arch = capabilities.device.arch
        if self._archs is not None and arch not in self._archs:
            return Reject("arch", f"has kernels for {', '.join(self._archs)}, not {arch}")
        if request.return_lse and request.mask != "none":
            return Reject("lse", f"gives the log-sum-exp without a mask, not with {request.mask}")
        return refuse_library(self._library, capabilities)

    def whole(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        function = library_function(self._module, "flash_attn_func")
        out = function(q, k, v, softmax_scale=scale, causal=causal)
        return out if isinstance(out, Tensor) else out[0]  # some versions give the log-sum-exp always

    def run_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(mask, NoMask), "refused by check"
        function = library_function(self._module, "flash_attn_func")
        result = function(q, k, v, softmax_scale=scale, causal=False, **{self._lse_flag: True})
        return result[0], result[1]


AITER_ATTENTION = FlashAttention("aiter", "aiter", "aiter", archs=AITER, lse_flag="return_lse")
FLASH_ATTN = FlashAttention(
    "flash_attn", "flash-attn", "flash_attn", archs=None, lse_flag="return_attn_probs"
)
# AOTriton's kernels are right up to 256: beyond it, heads of 384 came out corrupt on gfx1100
# (vllm-omni#7484) and of 512 on gfx1151 (pytorch#189849). Heads are shared by repeating keys.
SDPA_FLASH = SdpaAttention(
    "sdpa_flash", SDPBackend.FLASH_ATTENTION, masks=MASKS_IN_PIECES, max_head_dim=256, grouped=False
)
SDPA_EFFICIENT = SdpaAttention(
    "sdpa_efficient",
    SDPBackend.EFFICIENT_ATTENTION,
    dtypes=HALVES | {"float32"},
    max_head_dim=256,
    grouped=False,
)
KERNELS = (AITER_ATTENTION, FLASH_ATTN, SDPA_FLASH, SDPA_EFFICIENT, ChunkedAttention())
