"""Quantisation from outside: swaps `nn.Linear` modules by name for `QuantizedLinear`, which encodes its
weight on arrival.

The swap happens on the meta device, before weights stream in. Each layer then takes its high-precision
weight, encodes and packs it and lets go of it, so the peak is the quantised model and one layer.

Letters: N out features, K in features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from portable_dit.backend import Backend, LinearKernel
from portable_dit.capabilities import Capabilities, LinearRequest
from portable_dit.errors import BackendError, WeightsError
from portable_dit.formats import Encoded, QuantizedRows, encode, format_named
from portable_dit.models.spec import matches


class QuantizationReport(NamedTuple):
    """What really runs quantised: layers that hold an encoded weight, and the bytes of those weights."""

    layers: int
    bytes: int


class QuantizedLinear(nn.Module):
    """A linear layer whose weight lives in a quantised format; stands where an `nn.Linear` stood.

    There is no `weight` parameter: a loader finds this module by name and hands the tensor to
    `accept_weight`, or to `accept_encoded` when the checkpoint is already in the format. `bias` is a
    parameter like any other.
    """

    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, kernel: LinearKernel) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.dtype = linear.weight.dtype
        self.kernel = kernel
        self.bias = linear.bias
        self.packed_names: tuple[str, ...] = ()

    def accept_weight(self, weight: Tensor) -> None:
        """Encodes and packs a weight [N, K] of any float dtype on the device where it is."""
        self._check_shape(weight)
        self.accept_encoded(encode(weight.detach(), self.kernel.format.name))

    def accept_encoded(self, weight: Encoded) -> None:
        """Packs a weight that is stored in this layer's format already."""
        self._check_shape(weight.values)
        if weight.format != self.kernel.format:
            raise WeightsError(
                f"a {weight.format.name} weight for a layer that runs {self.kernel.format.name}: stored "
                f"numbers are never re-quantised. Ask for quantization {weight.format.name}."
            )
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
        return self.kernel.apply(rows, packed, self.bias).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, format={self.kernel.format.name}, kernel={self.kernel.id}"
        )

    def _check_shape(self, weight: Tensor) -> None:
        wanted = (self.out_features, self.in_features)
        if tuple(weight.shape) != wanted:
            raise WeightsError(
                f"a weight {list(weight.shape)} for a layer that takes {list(wanted)}: "
                "the checkpoint does not fit its config."
            )


def quantize(
    module: nn.Module,
    *,
    format: str,
    keep: Sequence[str],
    backend: Backend,
    kernel_id: str,
    only: Sequence[str] = ("*",),
    capabilities: Capabilities | None = None,
    rows: int = 1024,
) -> None:
    """Swaps every `nn.Linear` that `only` names and `keep` does not for a `QuantizedLinear`.

    only, keep: globs over module names; one that names a module covers everything inside it. capabilities,
    rows: when given, the kernel is asked about each layer's shape at that many rows. Raises BackendError
    when it refuses a layer or when no layer is reached, before anything is swapped.
    """
    kernel = backend.linear_kernel(format_named(format).name, kernel_id)
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and matches(name, only) and not matches(name, keep)
    }
    if not layers:
        total = sum(isinstance(layer, nn.Linear) for layer in module.modules())
        raise BackendError(
            f"quantization {format} reaches none of the {total} linear layers of {type(module).__name__}: "
            f"keep is {list(keep)}, only is {list(only)}. Drop the format or narrow keep."
        )
    if capabilities is not None:
        _refuse_misfits(layers, kernel, capabilities, rows)
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, QuantizedLinear(layer, kernel))


def quantization_report(module: nn.Module) -> QuantizationReport:
    """Counts the layers that hold an encoded weight now, not those that were meant to."""
    sizes = [layer.packed_bytes for layer in module.modules() if isinstance(layer, QuantizedLinear)]
    return QuantizationReport(sum(size > 0 for size in sizes), sum(sizes))


def _refuse_misfits(
    layers: dict[str, nn.Linear], kernel: LinearKernel, capabilities: Capabilities, rows: int
) -> None:
    problems = []
    for name, layer in layers.items():
        dtype = str(layer.weight.dtype).removeprefix("torch.")
        request = LinearRequest(kernel.format.name, dtype, rows, layer.in_features, layer.out_features)
        reject = kernel.check(request, capabilities)
        if reject is not None:
            problems.append(f"{name} [{layer.out_features}, {layer.in_features}]: {reject.detail}")
    if problems:
        raise BackendError(
            f"quantization {kernel.format.name} with kernel {kernel.id!r} does not serve {len(problems)} "
            f"layers: {'; '.join(problems[:8])}. Add them to quantization.keep or choose another kernel."
        )
