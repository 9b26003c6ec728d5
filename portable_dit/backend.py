"""The contract of a backend, executable: every method has a short, correct, plain-PyTorch body.

The body is the documentation, the fallback and the oracle at once. A vendor subclasses `Backend`, overrides
what its device does better, and returns the instance from the `portable_dit_backends` hook. Kernels are
listed best first; the plan takes the first one that accepts a request and records why the others did not,
so the hot path holds a bound function and asks nothing.

Letters: B batch, S tokens, N heads (attention) or out features (linear), D head_dim, K in features, M rows.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_dit import host
from portable_dit.capabilities import (
    AttentionRequest,
    Capabilities,
    Device,
    ExpertRequest,
    FusionRequest,
    KernelLists,
    LinearRequest,
    Reject,
    Request,
)
from portable_dit.errors import BackendError, near
from portable_dit.formats import (
    FORMATS,
    QUANTIZED,
    Encoded,
    Format,
    QuantizedRows,
    decode,
    dequantize_blocks,
    format_named,
    quantize_blocks,
)
from portable_dit.masks import Mask, to_keep

if TYPE_CHECKING:
    from portable_dit.ops import Dispatch

API_VERSION = 1
PLAIN = "plain"  # the kernel id that means "leave the body in ops.py" or, for a linear layer, dequantise
Packed = Mapping[str, Tensor]
T = TypeVar("T")


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

    def __init__(self, format: str, id: str = PLAIN) -> None:
        self.format: Format = format_named(format)
        self.id = id

    def check(self, request: Request, capabilities: Capabilities) -> Reject | None:
        """None when this kernel serves the request on such a device, else the reason. Pure."""
        assert isinstance(request, LinearRequest)
        if request.format != self.format.name:
            return Reject("format", f"serves {self.format.name}, not {request.format}")
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

    def __init__(self, format: str, id: str = "emulated") -> None:
        super().__init__(format, id)

    def refuse(self, request: LinearRequest, capabilities: Capabilities) -> Reject | None:
        if self.format.activations is None:
            return Reject(
                "weight_only", f"{self.format.name} does not quantise its input, so nothing is emulated"
            )
        return None

    def apply(self, x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
        assert self.format.activations is not None
        weight = decode(Encoded(self.format, packed["values"], packed.get("scales")))
        exact = x.float()
        values, scales = quantize_blocks(exact, self.format, self.format.activations)
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

    def check(self, request: Request, capabilities: Capabilities) -> Reject | None:
        """None when this kernel serves the request on such a device, else the reason. Pure."""
        assert isinstance(request, ExpertRequest)
        shape = request.rows, request.in_features, request.out_features
        return self.linear.check(LinearRequest(request.format, request.dtype, *shape), capabilities)

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        """One expert's canonical weight in the form that `apply` wants; the layer stacks those of all."""
        return self.linear.pack(weight, dtype)

    def apply(self, x: Tensor, packed: Packed, dispatch: Dispatch, out_features: int) -> Tensor:
        """x [M, K] -> [R, N] in the dtype of x, as `ops.expert_linear`. packed: tensors of all experts."""
        rows = x if dispatch.rows is None else x[dispatch.rows]  # [R, K]
        return self._each(
            packed,
            dispatch,
            lambda part, own: self.linear.apply(rows[part], own, None),
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
            lambda part, own: self.linear.apply_quantized(values[part], scales[part], own, None, dtype),
            out=torch.empty(values.shape[0], out_features, dtype=dtype, device=values.device),
        )

    def _each(
        self, packed: Packed, dispatch: Dispatch, run: Callable[[slice, Packed], Tensor], *, out: Tensor
    ) -> Tensor:
        start = 0
        for expert, end in enumerate(dispatch.ends.tolist()):
            if end > start:
                part = slice(start, end)
                out[part] = run(part, {name: tensor[expert] for name, tensor in packed.items()})
            start = end
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


class Mark:
    """A point in the work of a lane, given out by `Lane.mark`. A vendor's holds its event."""


class Lane:
    """A queue of device work, and the only way to order two of them: streams and events in one, never to be
    mixed.

    This one runs everything at once in the caller, which is what a CPU does; waiting is then already over.
    """

    def run(self, function: Callable[[], T]) -> T:
        """Queues the device work of function on this lane."""
        return function()

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Queues a copy between tensors of equal shape and dtype; source must live until the copy is done."""
        destination.copy_(source)

    def mark(self) -> Mark:
        """A mark after everything queued so far."""
        return Mark()

    def wait(self, mark: Mark) -> None:
        """Work queued here from now on starts only when the mark is reached; the host does not block."""


@dataclass(frozen=True)
class ExtraKernels:
    """Kernels of other plugins, listed after the backend's own: installing one must not change a picture."""

    attention: tuple[AttentionKernel, ...] = ()
    linear: tuple[LinearKernel, ...] = ()
    fused: tuple[FusedOp, ...] = ()


@dataclass(frozen=True)
class _Lists:
    attention: Sequence[AttentionKernel]
    linear: Mapping[str, Sequence[LinearKernel]] = field(default_factory=dict)
    experts: Mapping[str, Sequence[ExpertKernel]] = field(default_factory=dict)
    fused: Mapping[str, Sequence[FusedOp]] = field(default_factory=dict)


class Backend:
    """One kind of device. These bodies are right for the host's own processor.

    id: what a recipe calls it. api_version: set it to the literal number that the plugin was written for;
    it has no value here on purpose, so that an old plugin cannot claim to be new.
    """

    id: str
    api_version: int
    extra: ExtraKernels = ExtraKernels()

    def devices(self) -> list[Device]:
        """The devices that are there. Cheap, free of side effects, [] when there are none."""
        free_total = host.memory()
        return [Device(self.id, 0, "cpu", "host processor", "plain", free_total[1])]

    def absence(self) -> str | None:
        """Why `devices()` is empty: the driver, the build of torch. None when it is not, or nobody knows."""
        return None

    def capabilities(self, device: Device) -> Capabilities:
        """What the device can do, probed."""
        return Capabilities(
            device=device,
            count=len(self.devices()),
            dtypes=frozenset({"float32"}),
            host_shares_memory=True,
            host_bytes=host.memory()[1],
        )

    def activate(self, device: Device) -> None:
        """Makes it this process's current device; heavy imports happen here and not before."""

    def memory(self, device: Device) -> tuple[int, int] | None:
        """(free, total) bytes; None when the driver does not say."""
        return host.memory()

    def peak_bytes(self, device: Device, *, reset: bool = False) -> int | None:
        """Highest bytes in use since the start or the last reset, read before it is reset."""
        return host.peak_bytes(reset=reset)

    def limit_memory(self, device: Device, nbytes: int) -> bool:
        """From now on this process has at most nbytes of the device; False where no limit can be set.

        Raises BackendError for a limit that the device cannot have.
        """
        return False

    def energy_joules(self, device: Device) -> float | None:
        """What the device has used since some moment in the past; None when it does not say."""
        return None

    def synchronize(self, device: Device) -> None:
        """Returns when all queued work of the device is done."""

    def trim(self, device: Device) -> None:
        """Gives memory that nothing uses back to the system."""
        gc.collect()

    def compute_lane(self, device: Device) -> Lane:
        """The lane that models run on."""
        return Lane()

    def lane(self, device: Device) -> Lane:
        """A further lane, for copies beside the computation; where there are none, one that runs inline."""
        return Lane()

    def host_buffer(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] on the host from which copies to the device are fast.

        It must cost nbytes: an allocator that pins in powers of two turns 41 GiB of blocks into 53.
        """
        return torch.empty(nbytes, dtype=torch.uint8)

    def graph(
        self, function: Callable[..., Tensor], example_inputs: Sequence[Tensor]
    ) -> Callable[..., Tensor] | None:
        """The function captured for replay with inputs of these shapes, bit for bit equal; None = call it
        eagerly.

        What it returns is the caller's to keep: the next replay does not change it.
        """
        return None

    def process_group(self, device: Device) -> dict[str, Any]:
        """Keyword arguments for torch.distributed.init_process_group on such devices."""
        return {"backend": "gloo"}

    def cluster_resources(self) -> Mapping[str, float]:
        """What a cluster's scheduler (Ray) calls one such device, and how much of it a rank takes."""
        return {"CPU": 1.0}

    def attention_kernels(self) -> Sequence[AttentionKernel]:
        """Best first. The plain body in ops.py comes after them and need not be listed."""
        return ()

    def linear_kernels(self) -> Mapping[str, Sequence[LinearKernel]]:
        """Best first, by format. Dequantising comes after them and need not be listed."""
        return {}

    def expert_kernels(self) -> Mapping[str, Sequence[ExpertKernel]]:
        """Best first, by format. Linear kernels, expert by expert, come after them and need not be listed."""
        return {}

    def fused_ops(self) -> Mapping[str, Sequence[FusedOp]]:
        """Best first, by seam name. Each entered with a measured win over the plain body."""
        return {}

    # What the engine calls; not for overriding.

    def with_extra(self, extra: ExtraKernels) -> Backend:
        """This backend with the kernels of other plugins behind its own."""
        other = copy.copy(self)
        other.extra = extra
        return other

    def kernel_lists(self) -> KernelLists:
        """All kernels as the plan reads them: own, those of plugins, and for linear formats the plain one."""
        lists = self._lists()
        return KernelLists(lists.attention, lists.linear, lists.experts, lists.fused)

    def attention_kernel(self, id: str) -> AttentionKernel:
        return _named(id, self._lists().attention, f"{self.id}: attention kernel")

    def linear_kernel(self, format: str, id: str) -> LinearKernel:
        return _named(
            id, self._lists().linear[format_named(format).name], f"{self.id}: {format} linear kernel"
        )

    def expert_kernel(self, format: str, id: str) -> ExpertKernel:
        return _named(
            id, self._lists().experts[format_named(format).name], f"{self.id}: {format} expert kernel"
        )

    def fused_op(self, op: str, id: str) -> FusedOp:
        return _named(id, self._lists().fused.get(op, ()), f"{self.id}: {op} kernel")

    def _lists(self) -> _Lists:
        own_linear, own_fused = self.linear_kernels(), self.fused_ops()
        linear = {
            name: (
                *own_linear.get(name, ()),
                *(k for k in self.extra.linear if k.format.name == name),
                LinearKernel(name),
            )
            for name in (*QUANTIZED, *(f for f in own_linear if f in FORMATS and f not in QUANTIZED))
        }
        own_experts = self.expert_kernels()
        experts = {
            name: (*own_experts.get(name, ()), *(ExpertKernel(kernel) for kernel in kernels))
            for name, kernels in linear.items()
        }
        ops = dict.fromkeys((*own_fused, *(k.op for k in self.extra.fused)))
        fused = {op: (*own_fused.get(op, ()), *(k for k in self.extra.fused if k.op == op)) for op in ops}
        return _Lists((*self.attention_kernels(), *self.extra.attention), linear, experts, fused)


K = TypeVar("K", AttentionKernel, LinearKernel, ExpertKernel, FusedOp)


def _named(id: str, kernels: Sequence[K], what: str) -> K:
    for kernel in kernels:
        if kernel.id == id:
            return kernel
    raise BackendError(f"{what} {id!r} does not exist.{near(id, [kernel.id for kernel in kernels])}")
