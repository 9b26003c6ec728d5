"""Attention from the FlashAttention packages and SageAttention, gated by what ran in this process.

All are called by keyword: positional order differs between packages and between versions.

Letters: B batch, S tokens, N heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from portable_dit.capabilities import AttentionRequest, Capabilities, Reject
from portable_dit.errors import BackendError
from portable_dit.masks import Mask, NoMask
from portable_dit.piecewise import MASKS_IN_PIECES, sorted_keys
from portable_dit_cuda.attention import OnChips
from portable_dit_cuda.chips import refuse_library
from portable_dit_cuda.fusions import has_triton, quantize_heads

FA3_MODULES = ("fa3_fwd_interface", "flash_attn_interface")  # the wheel, and a build from source
FA4_MODULES = ("flash_attn.cute",)
SAGE_MODULES = ("sageattention",)
E4M3_MAX = 448.0


@cache
def library_function(modules: tuple[str, ...], name: str) -> Callable[..., Any]:
    """The function of the first of the modules that is installed. Raises BackendError when none is."""
    for module in modules:
        try:
            found: Callable[..., Any] = getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            if error.name != module.split(".")[0]:
                raise  # it is installed, and something that it needs is not
            continue
        return found
    raise BackendError(f"none of {', '.join(modules)} is installed; see docs/cuda.md for the package.")


class FlashAttention(OnChips):
    """FlashAttention 3 or 4. The causal mask is aligned at the last key, as ours is."""

    gives_lse = True

    def __init__(
        self,
        id: str,
        library: str,
        modules: tuple[str, ...],
        *,
        least: tuple[int, int],
        most: tuple[int, int],
        dtypes: frozenset[str],
        max_head_dim: int,
        lse_flag: str,
    ) -> None:
        self.id = id
        self.library = library
        self.modules = modules
        self.least, self.most = least, most
        self.dtypes = dtypes
        self.max_head_dim = max_head_dim
        self._lse_flag = lse_flag

    def refuse_further(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        if request.return_lse and request.mask != "none":
            return Reject("lse", f"gives the log-sum-exp without a mask, not with {request.mask}")
        return refuse_library(self.library, capabilities)

    def whole(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        function = library_function(self.modules, "flash_attn_func")
        return _first(function(q, k, v, softmax_scale=scale, causal=causal))

    def padded(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, *, scale: float) -> Tensor:
        k, v, used = sorted_keys(k, v, keep)
        (batch, rows_q), rows_k = q.shape[:2], k.shape[1]
        function = library_function(self.modules, "flash_attn_varlen_func")
        steps = torch.arange(batch + 1, device=q.device, dtype=torch.int32)
        out = function(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            cu_seqlens_q=steps * rows_q,
            cu_seqlens_k=steps * rows_k,
            max_seqlen_q=rows_q,
            max_seqlen_k=rows_k,
            seqused_k=used,
            softmax_scale=scale,
            causal=False,
        )
        return _first(out).view(batch, rows_q, *q.shape[2:])

    def run_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(mask, NoMask), "refused by check"
        function = library_function(self.modules, "flash_attn_func")
        result = function(q, k, v, softmax_scale=scale, causal=False, **{self._lse_flag: True})
        return result[0], result[1]


class Fa3Fp8Attention(OnChips):
    """FlashAttention 3 on e4m3 queries, keys and values, one scale per batch entry and key head.

    The product alone takes three quarters of the time of bfloat16 at 16800 rows; the error is that of
    e4m3, 5.3e-2 of the result on random data. So it runs only when it is named.
    """

    id = "fa3_fp8"
    rounds_to = "float8_e4m3fn"
    least, most = (9, 0), (9, 0)
    dtypes = frozenset({"bfloat16"})
    masks = MASKS_IN_PIECES

    def refuse_further(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        if request.head_dim not in (64, 128, 256):
            return Reject("head_dim", f"takes 64, 128 and 256 in fp8, not {request.head_dim}")
        return refuse_library("fa3-fwd", capabilities)

    def whole(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        heads = k.shape[2]
        (q, q_scale), (k, k_scale), (v, v_scale) = (heads_in_8_bits(t, heads) for t in (q, k, v))
        function = library_function(FA3_MODULES, "flash_attn_func")
        out = function(
            q,
            k,
            v,
            softmax_scale=scale,
            causal=causal,
            q_descale=q_scale,
            k_descale=k_scale,
            v_descale=v_scale,
        )
        return _first(out)


class SageAttention(OnChips):
    """SageAttention: int8 scores. Changes numbers, so it runs only when it is named."""

    id = "sage"
    rounds_to = "int8"
    least, most = (8, 0), (12, 1)
    masks = MASKS_IN_PIECES
    max_head_dim = 128
    causal_at_last = False

    def refuse_further(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        if request.num_heads != request.num_kv_heads:
            return Reject("heads", "takes as many key heads as query heads")
        if request.head_dim not in (64, 96, 128):
            return Reject("head_dim", f"takes 64, 96 and 128, not {request.head_dim}")
        return refuse_library("sageattention", capabilities)

    def whole(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        function = library_function(SAGE_MODULES, "sageattn")
        q, k, v = (t.contiguous() for t in (q, k, v))
        out: Tensor = function(q, k, v, tensor_layout="NHD", is_causal=causal, sm_scale=scale)
        return out


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Some versions give (out, lse) always."""
    return result if isinstance(result, Tensor) else result[0]


def heads_in_8_bits(x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """x [B, S, N, D] as e4m3, and the scale [B, heads] that each group of N / heads heads shares."""
    return (quantize_heads if x.is_cuda and has_triton() else quantize_heads_plainly)(x, heads)


def quantize_heads_plainly(x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """`heads_in_8_bits` where there is no Triton."""
    groups = x.unflatten(2, (heads, -1))  # [B, S, heads, N / heads, D]
    scales = (groups.abs().amax(dim=(1, 3, 4)).float() / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    values = (groups.float() / scales[:, None, :, None, None]).to(torch.float8_e4m3fn)
    return values.flatten(2, 3), scales


FA3 = FlashAttention(
    "fa3",
    "fa3-fwd",
    FA3_MODULES,
    least=(9, 0),
    most=(9, 0),
    dtypes=frozenset({"bfloat16"}),  # the wheel is built without float16
    max_head_dim=256,
    lse_flag="return_attn_probs",
)
FA4 = FlashAttention(
    "fa4",
    "flash-attn-4",
    FA4_MODULES,
    least=(10, 0),
    most=(11, 0),
    dtypes=frozenset({"bfloat16", "float16"}),
    max_head_dim=128,
    lse_flag="return_lse",
)
