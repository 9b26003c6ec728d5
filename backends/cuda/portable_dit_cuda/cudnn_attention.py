"""cuDNN's attention on e4m3 queries, keys and values, through the package nvidia-cudnn-frontend.

torch's own call of cuDNN takes no 8-bit tensors. The frontend builds a graph of one operation for each shape,
which is planned once and then only executed. Its scales are of whole tensors: one number for the queries and
one for the keys. Values have one for each key head all the same: the result of a head is linear in its
values, so each head is quantised with its own scale, cuDNN is told that the scale is 1, and the result of the
head is multiplied by it afterwards.

On compute capability 9.0 the result comes in e4m3 as well, and its scale has to be said before it is known.
It is known enough: a result is a mean of values with weights that sum up to 1, so it is no larger than the
largest of them; rounding the weights to e4m3 adds a sixteenth at most.

Letters: B batch, S tokens, N heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from portable_dit.capabilities import AttentionRequest, Capabilities, Reject
from portable_dit.errors import BackendError
from portable_dit.piecewise import MASKS_IN_PIECES
from portable_dit_cuda.attention import OnChips
from portable_dit_cuda.chips import capability_of, refuse_library
from portable_dit_cuda.flash import heads_in_8_bits
from portable_dit_cuda.fusions import has_triton
from portable_dit_cuda.linear import expand

LIBRARY = "nvidia-cudnn-frontend"
WEIGHT_SCALE = 256.0  # weights are 0 .. 1 and e4m3 ends at 448; a power of two rounds as none at all would
RESULT_SCALE = 1 / (1 + 2**-4)  # e4m3 rounds a weight by a sixteenth of it at most
# Plans whose kernels a graph replays: they must outlive the others, since a replay does not come by here.
captured: set[Callable[[Mapping[str, Tensor]], Tensor]] = set()
PLANS = 64  # shapes that are planned and kept; a picture has one, or one for each piece of its mask
SCALES: Mapping[str, float] = {
    "descale_v": 1.0,
    "descale_s": 1 / WEIGHT_SCALE,
    "scale_s": WEIGHT_SCALE,
    "scale_o": RESULT_SCALE,
}


class CudnnFp8Attention(OnChips):
    """cuDNN in e4m3: one scale for a batch entry's queries, one for its keys, one for each head's values.

    It runs only when it is named. Batch entries are attended to one by one, so that none shares its scales.
    The operation alone takes 0.745 ms at 4416 rows of 56 heads on an H200 with cuDNN 9.19, and 9.69 ms at
    16800, where FlashAttention 3 in bfloat16 takes 0.86 and 11.6; the error is 6.0e-2 on random data.
    """

    id = "cudnn_fp8"
    rounds_to = "float8_e4m3fn"
    least, most = (9, 0), (10, 9)
    dtypes = frozenset({"bfloat16"})
    masks = MASKS_IN_PIECES
    head_dim_multiple = 16
    max_head_dim = 256
    causal_at_last = False  # bottom-right masks in 8 bits need compute capability 10.0

    def refuse_further(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        if request.head_dim > 128 and capability_of(capabilities) != (9, 0):
            return Reject("head_dim", f"takes more than 128 on 9.0 alone, not {request.head_dim}")
        return refuse_library(LIBRARY, capabilities)

    def whole(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        if q.shape[1] == 1:  # cuDNN 9.19 has no plan for one query; it sees all keys in either mask
            return self.whole(q.expand(-1, 2, -1, -1), k, v, causal=False, scale=scale)[:, :1]
        entries = [
            _attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], causal=causal, scale=scale)
            for i in range(q.shape[0])
        ]
        return entries[0] if len(entries) == 1 else torch.cat(entries)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """[1, Sq, N, D], [1, Sk, heads, D] twice -> [1, Sq, N, D]."""
    heads, device = k.shape[2], q.device
    (q_values, q_scale), (k_values, k_scale) = heads_in_8_bits(q, 1), heads_in_8_bits(k, 1)
    v_values, v_scales = heads_in_8_bits(v, heads)
    gives = q.dtype if q.is_cuda and torch.cuda.get_device_capability(device) >= (10, 0) else q_values.dtype
    plan = _plan(_Shape(device, q.shape[1], k.shape[1], q.shape[2], heads, q.shape[3], causal, scale, gives))
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        captured.add(plan)
    result = plan(
        {
            "q": q_values.contiguous(),
            "k": k_values.contiguous(),
            "v": v_values.contiguous(),
            "descale_q": q_scale.view(1, 1, 1, 1),
            "descale_k": k_scale.view(1, 1, 1, 1),
        }
    )
    back = v_scales.repeat_interleave(q.shape[2] // heads, dim=1) / RESULT_SCALE  # [1, N]
    if q.is_cuda and has_triton():
        rows = result.view(q.shape[1], -1)  # [S, N * D]
        return expand(rows, back, (0, q.shape[3]), q.dtype).view(q.shape)
    return result.to(q.dtype).mul_(back[:, None, :, None])


@dataclass(frozen=True)
class _Shape:
    """What a plan is made for. gives: the dtype of the result."""

    device: torch.device
    rows_q: int
    rows_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    causal: bool
    scale: float
    gives: torch.dtype

    def lies(self, rows: int, heads: int) -> tuple[list[int], list[int]]:
        """Sizes and strides of rows [1, S, N, D] in cuDNN's order of axes, [B, N, S, D]."""
        dim = self.head_dim
        return [1, heads, rows, dim], [rows * heads * dim, dim, heads * dim, 1]


@lru_cache(maxsize=PLANS)
def _plan(shape: _Shape) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """What runs one planned operation: tensors by name -> the result [1, Sq, N, D] in shape.gives.

    Raises BackendError when cuDNN has no plan for the shape.
    """
    cudnn = _cudnn()
    kinds = cudnn.data_type
    types = {torch.float8_e4m3fn: kinds.FP8_E4M3, torch.bfloat16: kinds.BFLOAT16}
    handle = _handle(shape.device)
    graph = cudnn.pygraph(
        io_data_type=kinds.FP8_E4M3,
        intermediate_data_type=kinds.FLOAT,
        compute_data_type=kinds.FLOAT,
        handle=handle,
    )
    places = {
        name: shape.lies(rows, heads)
        for name, rows, heads in (
            ("q", shape.rows_q, shape.heads_q),
            ("k", shape.rows_k, shape.heads_k),
            ("v", shape.rows_k, shape.heads_k),
        )
    }
    inputs = {
        name: graph.tensor(name=name, dim=dim, stride=stride, data_type=kinds.FP8_E4M3)
        for name, (dim, stride) in places.items()
    } | {
        name: graph.tensor(name=name, dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kinds.FLOAT)
        for name in ("descale_q", "descale_k", *SCALES)
    }
    out, _, *largest = graph.sdpa_fp8(
        **inputs, attn_scale=shape.scale, use_causal_mask=shape.causal, is_inference=True, name="attention"
    )
    dim, stride = places["q"]
    out.set_output(True).set_dim(dim).set_stride(stride).set_data_type(types[shape.gives])
    for unused in largest:  # the largest weight and result, for those who learn scales from call to call
        unused.set_output(False).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_data_type(kinds.FLOAT)
    _build(graph, cudnn)
    needs = max(graph.get_workspace_size(), 1)
    fixed = {name: _number(value, shape.device) for name, value in SCALES.items()}

    def run(tensors: Mapping[str, Tensor]) -> Tensor:
        result = torch.empty(
            (1, shape.rows_q, shape.heads_q, shape.head_dim), dtype=shape.gives, device=shape.device
        )
        workspace = torch.empty(needs, dtype=torch.uint8, device=shape.device)
        given = {inputs[name]: tensor for name, tensor in {**fixed, **tensors}.items()}
        if handle is not None:
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(shape.device).cuda_stream)
        graph.execute({**given, out: result}, workspace, handle=handle)
        return result

    return run


def _build(graph: Any, cudnn: Any) -> None:
    """Step by step, as every version of the package knows it."""
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
    except cudnn.cudnnGraphNotSupportedError as error:
        raise BackendError(f"cudnn_fp8: cuDNN has no plan for this call: {error}") from error


@cache
def _cudnn() -> Any:
    """The package. torch is imported already, so the cuDNN that it finds is torch's."""
    return import_module("cudnn")


@cache
def _handle(device: torch.device) -> Any | None:
    """One of the library's handles for each device, bound to it when it is made; None on a host."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        return _cudnn().create_handle()


@cache
def _number(value: float, device: torch.device) -> Tensor:
    """float32 [1, 1, 1, 1], outside of any captured graph's memory."""
    with torch.inference_mode(False):
        return torch.full((1, 1, 1, 1), value, device=device)
