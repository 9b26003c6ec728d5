"""torch's own attention, pinned to one implementation at a time and gated by compute capability."""

from __future__ import annotations

from torch.nn.attention import SDPBackend

from portable_dit.capabilities import AttentionRequest, Capabilities, Reject
from portable_dit.piecewise import MASKS_IN_PIECES, PiecewiseAttention, SdpaAttention
from portable_dit_cuda.chips import Capability, capability_of


class OnChips(PiecewiseAttention):
    """Attention that some chips have. least, most: compute capabilities, most inclusive."""

    least: Capability = (8, 0)
    most: Capability | None = None

    def refuse(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        capability = capability_of(capabilities)
        if capability < self.least or (self.most is not None and capability > self.most):
            span = ".".join(map(str, self.least))
            if self.most is None:
                span += " on"
            elif self.most != self.least:
                span += f" to {'.'.join(map(str, self.most))}"
            return Reject("arch", f"needs compute capability {span}, this is {capability[0]}.{capability[1]}")
        return super().refuse(request, capabilities)


class TorchAttention(OnChips, SdpaAttention):
    """torch's scaled_dot_product_attention by one implementation."""

    def refuse_further(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        cudnn = self.implementation is SDPBackend.CUDNN_ATTENTION
        if cudnn and request.head_dim > 128 and capability_of(capabilities) != (9, 0):
            return Reject(
                "head_dim", f"beyond 128 cuDNN serves compute capability 9.0, not {request.head_dim}"
            )
        return None


TORCH_ATTENTION = (
    TorchAttention("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION),
    TorchAttention("sdpa_flash", SDPBackend.FLASH_ATTENTION, masks=MASKS_IN_PIECES),
    TorchAttention(
        "sdpa_efficient",
        SDPBackend.EFFICIENT_ATTENTION,
        dtypes=frozenset({"bfloat16", "float16", "float32"}),
        grouped=False,
    ),
)
