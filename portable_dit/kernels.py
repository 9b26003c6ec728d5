"""Kernels: what a backend lists, each with a short, correct, plain-PyTorch body.

A body is the documentation, the fallback and the oracle at once. `check` answers from data alone and says why
not; the plan takes the first that accepts, so the hot path holds a bound function and asks nothing.

Letters: B batch, S tokens, N heads (attention) or out features (linear), D head_dim, K in features, M rows, R
rows ordered by expert, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_dit.capabilities import (
    AttentionRequest,
    Capabilities,
    ExpertRequest,
    FusionRequest,
    LinearRequest,
    Reject,
    Request,
)
from portable_dit.formats import (
    WHOLE,
    Agree,
    Encoded,
    Format,
    QuantizedRows,
    decode,
    dequantize_blocks,
    format_named,
    largest_of_blocks,
    quantize_blocks,
)
from portable_dit.masks import Mask, to_keep

if TYPE_CHECKING:
    from portable_dit.ops import Dispatch

PLAIN = "plain"  # the kernel id that means "leave the body in ops.py" or, for a linear layer, dequantise
Packed = Mapping[str, Tensor]


class AttentionKernel:
    """Attention with the signature of `ops.attention`; this body computes in float32, in the open.

    Subclasses override `run`, and `refuse` to say what they do not take.
    """

    id: str = "math"
    # Set by a kernel that quantises inside, and its error is judged by it: e4m3 of queries, keys and values,
    # or int8 of queries and keys. Such a kernel runs only when it is named.
    rounds_to: Literal["float8_e4m3fn", "int8"] | None = None

    @property
    def exact(self) -> bool:
        return self.rounds_to is None

    def check(self, request: Request, capabilities: Capabilities) -> Reject | None:
        """None when this kernel serves the request on such a device, else the reason. Pure."""
        assert isinstance(request, AttentionRequest)
        return self.refuse(request, capabilities)

    def refuse(self, request: AttentionRequest, capabilities: Capabilities) -> Reject | None:
        return None

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float) -> Tensor:
        """q [B, Sq, N, D], k and v [B, Sk, Nkv, D] -> [B, Sq, N, D]. A row that sees nothing gives zeros."""
        return self.run_with_lse(q, k, v, mask, scale=scale)[0]

    def run_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `run`, with the float32 log-sum-exp of the scores [B, N, Sq]; -inf where a row sees nothing."""
        groups = q.shape[2] // k.shape[2]
        k, v = (t.repeat_interleave(groups, dim=2) for t in (k, v))
        scores = torch.einsum("bqnd,bknd->bnqk", q.float(), k.float()) * scale  # [B, N, Sq, Sk]
        keep = to_keep(mask, q.shape[1], k.shape[1], q.device)
        if keep is not None:
            scores = scores.masked_fill(~keep, float("-inf"))
        lse = scores.logsumexp(dim=-1)  # [B, N, Sq]
        weights = (scores - lse[..., None]).exp().nan_to_num(0.0)  # -inf - -inf: a row that sees nothing
        return torch.einsum("bnqk,bknd->bqnd", weights, v.float()).to(v.dtype), lse


class LinearKernel:
    """A linear layer over encoded weights. This body dequantises the weight and leaves the input alone.

    That is exact to the stored numbers on any device, so it is every format's last kernel. Packed forms are
    plain tensors by name, which offload moves and a checkpoint never sees.
    """

    exact: bool = True
    quantizes_input: bool = False  # True: computes as the format says; False: exact to the stored weight
    takes_quantized: bool = False  # True: `apply_quantized` takes rows with one scale each, made elsewhere
    agrees: bool = False  # True: `apply_divided` rounds a part of an input as all of it would be rounded

    def __init__(self, format: str, id: str = PLAIN) -> None:
        self.format: Format = format_named(format)
        self.id = id

    def check(self, request: Request, capabilities: Capabilities) -> Reject | None:
        """None when this kernel serves the request on such a device, else the reason. Pure."""
        assert isinstance(request, LinearRequest)
        if request.format != self.format.name:
            return Reject("format", f"serves {self.format.name}, not {request.format}")
        if request.divided and self.quantizes_input and not self.agrees:
            why = "quantises an input that is divided over devices with scales of each part alone"
            return Reject("divided", f"{why}, so that numbers would depend on how many there are")
        return self.refuse(request, capabilities)

    def refuse(self, request: LinearRequest, capabilities: Capabilities) -> Reject | None:
        return None

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        """The canonical weight in the form that `apply` wants, for inputs of dtype."""
        packed = {"values": weight.values}
        if weight.scales is not None:
            packed["scales"] = weight.scales
        return packed

    def apply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        """x [M, K] -> [M, N] in the dtype of x. bias [N] or None."""
        weight = decode(Encoded(self.format, packed["values"], packed.get("scales")), x.dtype)
        return F.linear(x, weight, bias)

    def apply_divided(self, x: Tensor, packed: Packed, bias: Tensor | None, agree: Agree) -> Tensor:
        """`apply` for a part of an input that is divided over devices, rounded as the whole would be.

        agree: the largest magnitude of each block of this part -> those of all parts. A kernel that `agrees`
        calls it once and makes its scales of what comes back; one that leaves inputs alone has no use for it.
        """
        return self.apply(x, packed, bias)

    def apply_quantized(
        self, values: Tensor, scales: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """`apply` for an input in the format already: values [M, K], scales [M, 1] -> [M, N] in dtype."""
        return self.apply((values.float() * scales).to(dtype), packed, bias)


class EmulatedLinear(LinearKernel):
    """Computes just what a matrix unit of that format computes, in float32: for trying a format without the
    hardware.

    Weight and input are both quantised and dequantised, so the numbers are those of the real thing up to
    the order of the sums. An emulation saves memory, not time.
    """

    quantizes_input = True
    agrees = True

    def __init__(self, format: str, id: str = "emulated") -> None:
        super().__init__(format, id)

    def refuse(self, request: LinearRequest, capabilities: Capabilities) -> Reject | None:
        if self.format.activations is None:
            return Reject(
                "weight_only", f"{self.format.name} does not quantise its input, so nothing is emulated"
            )
        return None

    def apply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        return self._apply(x, packed, bias, None)

    def apply_divided(self, x: Tensor, packed: Packed, bias: Tensor | None, agree: Agree) -> Tensor:
        return self._apply(x, packed, bias, agree)

    def _apply(self, x: Tensor, packed: Packed, bias: Tensor | None, agree: Agree | None) -> Tensor:
        assert self.format.activations is not None
        weight = decode(Encoded(self.format, packed["values"], packed.get("scales")))
        values, scales = quantize_blocks(x.float(), self.format, self.format.activations, agree=agree)
        seen = dequantize_blocks(values, scales, self.format, self.format.activations)
        return F.linear(seen, weight, None if bias is None else bias.float()).to(x.dtype)


class ExpertKernel:
    """The linear layers of a mixture's experts at once, over encoded weights and rows ordered by expert.

    This body takes one expert after the other through a linear kernel, and so asks the device how many rows
    each has. Every format has one for each of its linear kernels, behind what a backend lists.
    """

    exact: bool = True

    def __init__(self, linear: LinearKernel, id: str | None = None) -> None:
        self.linear = linear
        self.format = linear.format
        self.id = id or (linear.id if linear.id == PLAIN else f"each_{linear.id}")

    @property
    def takes_quantized(self) -> bool:
        """`apply_quantized` takes rows with one scale each, made elsewhere."""
        return self.linear.takes_quantized

    @property
    def quantizes_input(self) -> bool:
        """It computes as the format says; else it is exact to the stored weight."""
        return self.linear.quantizes_input

    def check(self, request: Request, capabilities: Capabilities) -> Reject | None:
        """None when this kernel serves the request on such a device, else the reason. Pure."""
        assert isinstance(request, ExpertRequest)
        shape = request.rows, request.in_features, request.out_features
        numbers = request.format, request.dtype
        return self.linear.check(LinearRequest(*numbers, *shape, request.divided), capabilities)

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        """One expert's canonical weight in the form that `apply` wants; the layer stacks those of all."""
        return self.linear.pack(weight, dtype)

    def apply(self, x: Tensor, packed: Packed, dispatch: Dispatch, out_features: int) -> Tensor:
        """x [M, K] -> [R, N] in the dtype of x, as `ops.expert_linear`. packed: tensors of all experts."""
        rows = x if dispatch.rows is None else x[dispatch.rows]  # [R, K]
        return self._each(
            packed,
            dispatch,
            lambda part, expert, own: self.linear.apply(rows[part], own, None),
            out=rows.new_empty(rows.shape[0], out_features),
        )

    def apply_divided(
        self, x: Tensor, packed: Packed, dispatch: Dispatch, out_features: int, agree: Agree
    ) -> Tensor:
        """`apply` for a part of an input that is divided over devices: see `LinearKernel.apply_divided`.

        Parts have the same rows for the same experts, or, where one scale spans an expert's rows, other rows.
        All experts agree at once: devices need not know which of them have rows elsewhere.
        """
        rows = x if dispatch.rows is None else x[dispatch.rows]  # [R, K]
        spans_rows = self.format.activations is not None and self.format.activations[0] == WHOLE
        agreed = agree(self._largest(rows, dispatch) if spans_rows else largest_of_blocks(rows, self.format))
        return self._each(
            packed,
            dispatch,
            lambda part, expert, own: self.linear.apply_divided(
                rows[part],
                own,
                None,
                lambda amax: agreed[expert : expert + 1] if spans_rows else agreed[part],
            ),
            out=rows.new_empty(rows.shape[0], out_features),
        )

    def apply_quantized(
        self,
        values: Tensor,
        scales: Tensor,
        packed: Packed,
        dispatch: Dispatch,
        out_features: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """`apply` for rows in the format already: values [M, K], scales [M, 1] -> [R, N] in dtype."""
        if dispatch.rows is not None:
            values, scales = values[dispatch.rows], scales[dispatch.rows]
        return self._each(
            packed,
            dispatch,
            lambda part, expert, own: self.linear.apply_quantized(
                values[part], scales[part], own, None, dtype
            ),
            out=torch.empty(values.shape[0], out_features, dtype=dtype, device=values.device),
        )

    def _largest(self, rows: Tensor, dispatch: Dispatch) -> Tensor:
        """The largest magnitude of each expert's rows, float32 [E, 1]; 0 for one without."""
        found = torch.zeros(dispatch.ends.numel(), 1, device=rows.device)
        for expert, part in dispatch.parts():
            found[expert] = largest_of_blocks(rows[part], self.format)[0]
        return found

    def _each(
        self, packed: Packed, dispatch: Dispatch, run: Callable[[slice, int, Packed], Tensor], *, out: Tensor
    ) -> Tensor:
        """run: rows, the expert's number and its weight -> what the rows become."""
        for expert, part in dispatch.parts():
            out[part] = run(part, expert, {name: tensor[expert] for name, tensor in packed.items()})
        return out


@dataclass(frozen=True)
class FusedOp:
    """A function that stands in for the plain body of the seam `op` in ops.py, with the same signature.

    quantized: by format, functions of the same signature that give `QuantizedRows` of the same result, bit
    for bit what the next layer would make of it. Bound where a quantised layer alone reads the seam.
    """

    op: str
    id: str
    run: Callable[..., Any]
    dtypes: frozenset[str] = frozenset({"float32", "bfloat16"})
    exact: bool = True
    quantized: Mapping[str, Callable[..., QuantizedRows]] = field(default_factory=dict)

    def check(self, request: Request, capabilities: Capabilities) -> Reject | None:
        """None when this op serves the request on such a device, else the reason. Pure."""
        assert isinstance(request, FusionRequest)
        if request.op != self.op:
            return Reject("op", f"serves {self.op}, not {request.op}")
        if request.dtype not in self.dtypes:
            return Reject("dtype", f"takes {', '.join(sorted(self.dtypes))}, not {request.dtype}")
        return None
