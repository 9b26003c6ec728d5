"""Binding: puts a backend's kernels into the seams of a model, by the choices of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from portable_dit.backend import PLAIN, Backend
from portable_dit.ops import Attention, Seam
from portable_dit.quantize import QuantizedExpertLinear, QuantizedLinear


def bind(
    module: nn.Module,
    backend: Backend,
    choices: Mapping[str, str],
    *,
    producers: Sequence[tuple[str, str]] = (),
) -> Mapping[str, int]:
    """Sets `run` of every seam whose op has a choice other than "plain"; gives the number of seams per op.

    choices: op name -> kernel id, as `Plan.choices(component)` gives them; "linear:<format>" and
    "experts:<format>" belong to `quantize` and are passed over. producers: seams and the one layer that reads
    each, as `ModelSpec.producers` names them; where that layer takes its input quantised and the seam's
    kernel can make it, it does, unless the seam has a part of what devices must agree on first. Raises
    BackendError when the backend has no kernel of that id.
    """
    wanted = {op: id for op, id in choices.items() if ":" not in op and id != PLAIN}
    functions = {
        op: backend.attention_kernel(id).run if op == Attention.op else backend.fused_op(op, id).run
        for op, id in wanted.items()
    }
    bound = dict.fromkeys(wanted, 0)
    for name, seam in module.named_modules():
        if isinstance(seam, Seam) and seam.op in functions:
            format = _read_in(module, name, producers)
            made = {} if format is None else backend.fused_op(seam.op, wanted[seam.op]).quantized
            seam.run = functions[seam.op] if format is None else made.get(format, functions[seam.op])
            bound[seam.op] += 1
    return bound


def _read_in(module: nn.Module, name: str, producers: Sequence[tuple[str, str]]) -> str | None:
    """The format in which the layer that reads a seam takes its input, None when it wants the tensor."""
    for seam, layer in producers:
        before, _, after = seam.partition("*")
        number = name.removeprefix(before).removesuffix(after)
        if name == seam.replace("*", number):
            found = module.get_submodule(layer.replace("*", number))
            if isinstance(found, QuantizedLinear | QuantizedExpertLinear) and found.agree is None:
                return found.kernel.format.name if found.kernel.takes_quantized else None
    return None
