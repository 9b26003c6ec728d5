"""Attention of torch's own function, pinned to one implementation each."""

from __future__ import annotations

from torch.nn.attention import SDPBackend

from portable_dit.capabilities import AttentionRequest, Capabilities, Reject
from portable_dit.piecewise import HALVES, MASKS_IN_PIECES, ChunkedAttention, SdpaAttention
from portable_dit_xpu.device import FLASH_REFUSES

ALL_DTYPES = HALVES | {"float32"}
FLASH_HEAD_DIMS = (64, 96, 128, 192)  # those that the kernels of every version since 2.10 were compiled for


class FlashAttention(SdpaAttention):
    """The SYCL-TLA kernel, which is in torch since 2.10; pinning it before ran oneDNN's, with a warning."""

    def refuse_further(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        arch = capabilities.device.arch
        if arch in FLASH_REFUSES:
            return Reject("arch", f"its results on {arch} were reported wrong")
        if request.head_dim not in FLASH_HEAD_DIMS:
            return Reject("head_dim", f"compiled for {FLASH_HEAD_DIMS}, not {request.head_dim}")
        return None


# oneDNN's graph of matmul, softmax, matmul: any mask, shared key heads, heads to 576 (torch,
# aten/src/ATen/native/mkldnn/xpu/Attention.cpp, read 2026-11-30).
ONEDNN = SdpaAttention("sdpa_onednn", SDPBackend.OVERRIDEABLE, dtypes=ALL_DTYPES, max_head_dim=576)
FLASH = FlashAttention("sdpa_flash", SDPBackend.FLASH_ATTENTION, masks=MASKS_IN_PIECES)
KERNELS = (ONEDNN, FLASH, ChunkedAttention())
