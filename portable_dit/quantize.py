"""Quantisation from outside: swaps `nn.Linear` modules by name for `QuantizedLinear`, and `ExpertLinear` for
`QuantizedExpertLinear`, which encode their weights on arrival.

The swap happens on the meta device, before weights stream in. Each layer then takes its high-precision
weight, encodes and packs it and lets go of it, so the peak is the quantised model and one layer.

Letters: N out features, K in features, E experts, R rows ordered by expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from portable_dit.backend import Backend, ExpertKernel, LinearKernel
from portable_dit.capabilities import Capabilities, ExpertRequest, LinearRequest, Reject
from portable_dit.errors import BackendError, WeightsError
from portable_dit.formats import Agree, Encoded, QuantizedRows, encode, format_named
from portable_dit.models.spec import matches
from portable_dit.ops import Dispatch, ExpertLinear


class QuantizationReport(NamedTuple):
    """What really runs quantised: layers that hold an encoded weight, and the bytes of those weights.

    mixtures: how many of the layers are those of experts.
    """

    layers: int
    bytes: int
    mixtures: int = 0


class QuantizedLinear(nn.Module):
    """A linear layer whose weight lives in a quantised format; stands where an `nn.Linear` stood.

    There is no `weight` parameter: a loader finds this module by name and hands it the weight in the format
    (`accept_encoded`), as it was stored or as it encoded it; `accept_weight` does both. `bias` is a parameter
    like any other.

    agree: what ranks that share its input ask each other before it is quantised; None = all of it is here.
    """

    bias: nn.Parameter | None
    agree: Agree | None = None

    def __init__(self, linear: nn.Linear, kernel: LinearKernel) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.dtype = linear.weight.dtype
        self.kernel = kernel
        self.bias = linear.bias
        self.packed_names: tuple[str, ...] = ()

    def accept_weight(self, weight: Tensor, *, agree: Agree | None = None) -> None:
        """Encodes and packs a weight [N, K] of any float dtype on the device where it is; agree: `encode`."""
        self._check_shape(weight)
        self.accept_encoded(encode(weight.detach(), self.kernel.format.name, agree=agree))

    def accept_encoded(self, weight: Encoded) -> None:
        """Packs a weight that is stored in this layer's format already."""
        self._check_shape(weight.values)
        _refuse_other_format(weight, self.kernel.format.name)
        packed = self.kernel.pack(weight, self.dtype)
        for name, tensor in packed.items():
            self.register_buffer(f"packed_{name}", tensor, persistent=False)
        self.packed_names = tuple(f"packed_{name}" for name in packed)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weight; 0 until one was accepted."""
        return sum(getattr(self, name).nbytes for name in self.packed_names)

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        """x [..., K] -> [..., N] in the dtype of x."""
        packed = {name.removeprefix("packed_"): getattr(self, name) for name in self.packed_names}
        assert packed, "no weight was accepted"
        if isinstance(x, QuantizedRows):
            assert x.format == self.kernel.format, "bound to a layer of another format"
            out = self.kernel.apply_quantized(x.values, x.scales, packed, self.bias, x.dtype)
            return out.view(*x.shape[:-1], self.out_features)
        rows = x.reshape(-1, self.in_features)  # [M, K]
        if rows.shape[0] == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        if self.agree is None:
            out = self.kernel.apply(rows, packed, self.bias)
        else:
            out = self.kernel.apply_divided(rows, packed, self.bias, self.agree)
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, format={self.kernel.format.name}, kernel={self.kernel.id}"
        )

    def _check_shape(self, weight: Tensor) -> None:
        _refuse_other_shape(weight, (self.out_features, self.in_features))


class QuantizedExpertLinear(nn.Module):
    """The linear layers of a mixture's experts in a quantised format; stands where an `ExpertLinear` stood.

    Each expert's weight arrives on its own and is encoded on its own, so scales know nothing of the others.
    agree: as in `QuantizedLinear`.
    """

    agree: Agree | None = None

    def __init__(self, experts: ExpertLinear, kernel: ExpertKernel) -> None:
        super().__init__()
        self.first = experts.first
        self.num_experts = experts.num_experts
        self.in_features = experts.in_features
        self.out_features = experts.out_features
        self.dtype = experts.weight.dtype
        self.kernel = kernel
        self.packed_names: tuple[str, ...] = ()
        self._missing = set(range(experts.num_experts))

    def accept_weight(self, expert: int, weight: Tensor) -> None:
        """Encodes and packs the weight [N, K] of the expert-th one held here, on the device where it is."""
        _refuse_other_shape(weight, (self.out_features, self.in_features))
        self.accept_encoded(expert, encode(weight.detach(), self.kernel.format.name))

    def accept_encoded(self, expert: int, weight: Encoded) -> None:
        """Packs an expert's weight that is stored in this layer's format already."""
        _refuse_other_shape(weight.values, (self.out_features, self.in_features))
        _refuse_other_format(weight, self.kernel.format.name)
        packed = self.kernel.pack(weight, self.dtype)
        if not self.packed_names:
            for name, tensor in packed.items():
                stacked = torch.empty(
                    self.num_experts, *tensor.shape, dtype=tensor.dtype, device=tensor.device
                )
                self.register_buffer(f"packed_{name}", stacked, persistent=False)
            self.packed_names = tuple(f"packed_{name}" for name in packed)
        for name, tensor in packed.items():
            getattr(self, f"packed_{name}")[expert].copy_(tensor)
        self._missing.discard(expert)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights; 0 until all experts have theirs."""
        return 0 if self._missing else sum(getattr(self, name).nbytes for name in self.packed_names)

    def forward(self, x: Tensor | QuantizedRows, dispatch: Dispatch) -> Tensor:
        """x [M, K] -> [R, N] in the dtype of x, as `ops.expert_linear`."""
        packed = {name.removeprefix("packed_"): getattr(self, name) for name in self.packed_names}
        assert packed, "no weight was accepted"
        if isinstance(x, QuantizedRows):
            assert x.format == self.kernel.format, "bound to a layer of another format"
            return self.kernel.apply_quantized(
                x.values, x.scales, packed, dispatch, self.out_features, x.dtype
            )
        if self.agree is None:
            return self.kernel.apply(x, packed, dispatch, self.out_features)
        return self.kernel.apply_divided(x, packed, dispatch, self.out_features, self.agree)

    def extra_repr(self) -> str:
        return (
            f"experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}, "
            f"format={self.kernel.format.name}, kernel={self.kernel.id}"
        )


def _refuse_other_shape(weight: Tensor, wanted: tuple[int, int]) -> None:
    if tuple(weight.shape) != wanted:
        raise WeightsError(
            f"a weight {list(weight.shape)} for a layer that takes {list(wanted)}: "
            "the checkpoint does not fit its config."
        )


def _refuse_other_format(weight: Encoded, wanted: str) -> None:
    if weight.format.name != wanted:
        raise WeightsError(
            f"a {weight.format.name} weight for a layer that runs {wanted}: stored "
            f"numbers are never re-quantised. Ask for quantization {weight.format.name}."
        )


def quantize(
    module: nn.Module,
    *,
    format: str,
    keep: Sequence[str],
    backend: Backend,
    kernel_id: str | None,
    expert_kernel_id: str | None = None,
    only: Sequence[str] = ("*",),
    capabilities: Capabilities | None = None,
    rows: int = 1024,
) -> None:
    """Swaps every `nn.Linear` and `ExpertLinear` that `only` names, and `keep` does not, for its like.

    only, keep: globs over module names; one that names a module covers everything inside it. kernel_id,
    expert_kernel_id: None where the plan found no layer of that kind. capabilities, rows: when given, the
    kernel is asked about each layer's shape at that many rows. Raises BackendError when it refuses a layer or
    when no layer is reached, before anything is swapped.
    """
    name_of_format = format_named(format).name
    reached = {
        name: layer
        for name, layer in module.named_modules()
        if matches(name, only) and not matches(name, keep)
    }
    layers = {name: layer for name, layer in reached.items() if isinstance(layer, nn.Linear)}
    experts = {name: layer for name, layer in reached.items() if isinstance(layer, ExpertLinear)}
    if not layers and not experts:
        total = sum(isinstance(layer, nn.Linear) for layer in module.modules())
        raise BackendError(
            f"quantization {format} reaches none of the {total} linear layers of {type(module).__name__}: "
            f"keep is {list(keep)}, only is {list(only)}. Drop the format or narrow keep."
        )
    made: dict[str, nn.Module] = {}
    if layers:
        assert kernel_id is not None
        kernel = backend.linear_kernel(name_of_format, kernel_id)
        _refuse_misfits(layers, kernel, capabilities, rows)
        made |= {name: QuantizedLinear(layer, kernel) for name, layer in layers.items()}
    if experts:
        assert expert_kernel_id is not None
        grouped = backend.expert_kernel(name_of_format, expert_kernel_id)
        _refuse_misfits(experts, grouped, capabilities, rows)
        made |= {name: QuantizedExpertLinear(layer, grouped) for name, layer in experts.items()}
    for name, layer in made.items():
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, layer)


def quantized_weights(module: nn.Module) -> dict[str, tuple[QuantizedLinear | QuantizedExpertLinear, int]]:
    """Every weight [N, K] that a quantised layer waits for, by name: the layer, and which expert's it is.

    Experts' names count over all holders: `path.12.weight` is that of expert 12, wherever it is held.
    """
    found: dict[str, tuple[QuantizedLinear | QuantizedExpertLinear, int]] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, QuantizedLinear):
            found[f"{path}.weight"] = layer, 0
        elif isinstance(layer, QuantizedExpertLinear):
            names = expert_names(path, layer.first, layer.num_experts)
            found |= {name: (layer, expert) for expert, name in enumerate(names)}
    return found


def expert_names(path: str, first: int, count: int) -> list[str]:
    """The names of the weights of experts `first` on, in a module at `path`."""
    return [f"{path}.{expert}.weight" for expert in range(first, first + count)]


def quantization_report(module: nn.Module) -> QuantizationReport:
    """Counts the layers that hold an encoded weight now, not those that were meant to."""
    quantized = (QuantizedLinear, QuantizedExpertLinear)
    held = [m for m in module.modules() if isinstance(m, quantized) and m.packed_bytes > 0]
    mixtures = sum(isinstance(layer, QuantizedExpertLinear) for layer in held)
    return QuantizationReport(len(held), sum(layer.packed_bytes for layer in held), mixtures)


def _refuse_misfits(
    layers: Mapping[str, nn.Linear | ExpertLinear],
    kernel: LinearKernel | ExpertKernel,
    capabilities: Capabilities | None,
    rows: int,
) -> None:
    if capabilities is None:
        return
    problems = []
    for name, layer in layers.items():
        reject = _misfit(layer, kernel, capabilities, rows)
        if reject is not None:
            problems.append(f"{name} [{layer.out_features}, {layer.in_features}]: {reject.detail}")
    if problems:
        raise BackendError(
            f"quantization {kernel.format.name} with kernel {kernel.id!r} does not serve {len(problems)} "
            f"layers: {'; '.join(problems[:8])}. Add them to quantization.keep or choose another kernel."
        )


def _misfit(
    layer: nn.Linear | ExpertLinear,
    kernel: LinearKernel | ExpertKernel,
    capabilities: Capabilities,
    rows: int,
) -> Reject | None:
    numbers = kernel.format.name, str(layer.weight.dtype).removeprefix("torch."), rows
    shape = layer.in_features, layer.out_features
    if isinstance(layer, ExpertLinear):
        return kernel.check(ExpertRequest(*numbers, layer.num_experts, *shape), capabilities)
    return kernel.check(LinearRequest(*numbers, *shape), capabilities)
