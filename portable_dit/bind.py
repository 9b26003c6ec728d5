"""Binding: puts a backend's kernels into the seams of a model, by the choices of the plan."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from portable_dit.backend import PLAIN, Backend
from portable_dit.ops import Attention, Seam


def bind(module: nn.Module, backend: Backend, choices: Mapping[str, str]) -> Mapping[str, int]:
    """Sets `run` of every seam whose op has a choice other than "plain"; gives the number of seams per op.

    choices: op name -> kernel id, as `Plan.choices(component)` gives them; "linear:<format>" belongs to
    `quantize` and is passed over. Raises BackendError when the backend has no kernel of that id.
    """
    wanted = {op: id for op, id in choices.items() if not op.startswith("linear:") and id != PLAIN}
    functions = {
        op: backend.attention_kernel(id).run if op == Attention.op else backend.fused_op(op, id).run
        for op, id in wanted.items()
    }
    bound = dict.fromkeys(wanted, 0)
    for seam in module.modules():
        if isinstance(seam, Seam) and seam.op in functions:
            seam.run = functions[seam.op]
            bound[seam.op] += 1
    return bound
