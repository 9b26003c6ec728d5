"""Attention from MATE, and torch's own function pinned to muDNN's.

MATE is called by keyword and at its core, `mate.mha_interface`: its wrappers under FlashAttention's names
have changed places from version to version.

Letters: B batch, S tokens, N heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from portable_dit.capabilities import AttentionRequest, Capabilities, Reject
from portable_dit.errors import BackendError
from portable_dit.masks import Mask, NoMask
from portable_dit.piecewise import ChunkedAttention, PiecewiseAttention, SdpaAttention, sorted_keys
from portable_dit_musa.chips import FLASH_FROM, FP8_FROM, refuse_arch, refuse_mate


@cache
def mate_function(module: str, name: str) -> Callable[..., Any]:
    """A function of MATE. The package `mate` on the Python index is another one and has no such module."""
    try:
        found: Callable[..., Any] = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in ("mate", module):
            raise  # it is installed, and something that it needs is not
        raise BackendError(
            f"{module} is not installed; it is built from github.com/MooreThreads/mate."
        ) from None
    return found


class MateAttention(PiecewiseAttention):
    """MATE's FlashAttention. Its causal mask is aligned at the last key, as ours is.

    Up to 128 channels it runs prebuilt kernels, beyond them its own compiled ones.
    """

    id = "mate"
    gives_lse = True

    def refuse_further(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        if request.return_lse and request.mask != "none":
            return Reject("lse", f"gives the log-sum-exp without a mask, not with {request.mask}")
        return refuse_arch(capabilities.device.arch, FP8_FROM) or refuse_mate(capabilities)

    def whole(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        out: Tensor = _attend(q=q, k=k, v=v, softmax_scale=scale, causal=causal)
        return out

    def padded(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, *, scale: float) -> Tensor:
        """Kept keys first, and how many there are as lengths on the device: nothing waits for it."""
        k, v, used = sorted_keys(k, v, keep)
        (batch, rows_q), rows_k = q.shape[:2], k.shape[1]
        steps = torch.arange(batch + 1, device=q.device, dtype=torch.int32)
        out: Tensor = _attend(
            q=q.flatten(0, 1),
            k=k.flatten(0, 1),
            v=v.flatten(0, 1),
            cu_seqlens_q=steps * rows_q,
            cu_seqlens_k=steps * rows_k,
            max_seqlen_q=rows_q,
            max_seqlen_k=rows_k,
            seqused_k=used,
            softmax_scale=scale,
            causal=False,
        )
        return out.view(batch, rows_q, *q.shape[2:])

    def run_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(mask, NoMask), "refused by check"
        out, lse = _attend(q=q, k=k, v=v, softmax_scale=scale, causal=False, return_softmax_lse=True)
        return out, lse


def _attend(**arguments: Any) -> Any:
    return mate_function("mate.mha_interface", "flash_attn_varlen_func")(**arguments)


class MudnnAttention(SdpaAttention):
    """torch's function with muDNN's flash kernel, which torch_musa puts behind torch's own switch for it.

    Masks go in four dimensions: one of [B, Sq] is taken for padding there.
    """

    def refuse_further(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        return refuse_arch(capabilities.device.arch, FLASH_FROM)


MATE_ATTENTION = MateAttention()
MUDNN_ATTENTION = MudnnAttention("sdpa_mudnn", SDPBackend.FLASH_ATTENTION, max_head_dim=128, grouped=False)
KERNELS = (MATE_ATTENTION, MUDNN_ATTENTION, ChunkedAttention())
