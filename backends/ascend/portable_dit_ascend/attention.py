"""Attention of the NPU's fused operators.

Both take a mask in which True means "not seen", the opposite of torch's and ours, never broadcast over
queries, and both compute with scale 1 unless told otherwise. Everything is passed by name, always.

Letters: B batch, S tokens, N heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor

from portable_dit.capabilities import AttentionRequest, Capabilities, Reject
from portable_dit.masks import Mask, NoMask
from portable_dit.piecewise import HALVES, ChunkedAttention, PiecewiseAttention
from portable_dit_ascend.device import SERVED

LAYOUT = "BSND"
PLAIN, RIGHT_DOWN_CAUSAL = 0, 3  # sparse_mode; 3: causal with the last query at the last key
CAUSAL_SIDE = 2048  # the one size that the compressed causal mask has
MAX_HEADS = 256
MAX_ROW = 65535  # of N * D in the layouts with S before N
_being_captured: ContextVar[bool] = ContextVar("being_captured", default=False)


@contextmanager
def capturing() -> Iterator[None]:
    """Inside, kernels that cannot be captured raise instead: before the capture begins, which is no harm."""
    token = _being_captured.set(True)
    try:
        yield
    finally:
        _being_captured.reset(token)


@cache
def causal_drop(device: torch.device) -> Tensor:
    """What a causal row does not see, True above the diagonal: [2048, 2048], for any number of rows."""
    with torch.inference_mode(False):
        return torch.ones(CAUSAL_SIDE, CAUSAL_SIDE, dtype=torch.bool, device=device).triu(1)


def dropped(keep: Tensor, rows_q: int) -> Tensor:
    """keep [B, Sk] as the operators want it: True = not seen, [B, 1, Sq, Sk], every row written out."""
    return (~keep)[:, None, None, :].expand(-1, 1, rows_q, -1).contiguous()


class NpuAttention(PiecewiseAttention):
    """What the two operators share."""

    def refuse_further(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        arch = capabilities.device.arch
        if arch not in SERVED:
            return Reject("arch", f"serves {', '.join(SERVED)}, not {arch}")
        if request.num_heads > MAX_HEADS:
            return Reject("heads", f"takes at most {MAX_HEADS} heads, not {request.num_heads}")
        if request.num_heads * request.head_dim >= MAX_ROW:
            return Reject("heads", f"takes heads x head_dim below {MAX_ROW} in this layout")
        return None

    def whole(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        if causal:
            return self.call(q, k, v, causal_drop(q.device), RIGHT_DOWN_CAUSAL, scale)
        return self.call(q, k, v, None, PLAIN, scale)

    def padded(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, *, scale: float) -> Tensor:
        return self.call(q, k, v, dropped(keep, q.shape[1]), PLAIN, scale)

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, drop: Tensor | None, sparse_mode: int, scale: float
    ) -> Tensor:
        """[B, Sq, N, D] of contiguous inputs in that layout."""
        raise AssertionError("each operator has its own names")


class FusedInferAttention(NpuAttention):
    """npu_fused_infer_attention_score: the inference operator, which can be captured."""

    id = "fused_infer"
    head_dim_multiple = 16
    max_head_dim = 512
    gives_lse = True

    def refuse_further(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        if request.return_lse and request.mask != "none":
            return Reject("lse", f"gives the log-sum-exp without a mask, not with {request.mask}")
        return super().refuse_further(request, capabilities)

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, drop: Tensor | None, sparse_mode: int, scale: float
    ) -> Tensor:
        return self._score(q, k, v, drop, sparse_mode, scale, lse=False)[0]

    def run_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(mask, NoMask), "refused by check"
        out, lse = self._score(q, k, v, None, PLAIN, scale, lse=True)  # lse [B, N, Sq, 1]
        return out, lse[..., 0]

    def _score(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        drop: Tensor | None,
        sparse_mode: int,
        scale: float,
        *,
        lse: bool,
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = torch.ops.npu.npu_fused_infer_attention_score(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            atten_mask=drop,
            num_heads=q.shape[2],
            num_key_value_heads=k.shape[2],
            scale=scale,
            input_layout=LAYOUT,
            sparse_mode=sparse_mode,
            softmax_lse_flag=lse,
        )
        return result


class FusionAttention(NpuAttention):
    """npu_fusion_attention: the training operator. It takes float32 and any head, and cannot be captured."""

    id = "fusion"
    dtypes = HALVES | {"float32"}
    head_dim_multiple = 1
    max_head_dim = 768

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, drop: Tensor | None, sparse_mode: int, scale: float
    ) -> Tensor:
        if _being_captured.get():
            raise RuntimeError("npu_fusion_attention cannot be captured")
        out: Tensor = torch.ops.npu.npu_fusion_attention(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            head_num=q.shape[2],
            input_layout=LAYOUT,
            atten_mask=drop,
            scale=scale,
            keep_prob=1.0,
            sparse_mode=sparse_mode,
        )[0]
        return out


KERNELS = (FusedInferAttention(), FusionAttention(), ChunkedAttention())
