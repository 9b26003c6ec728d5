"""One rank's part of a model: every parallel form of its mesh, in the order in which a component is made.

shrink     on the meta device, before layers are quantised
shares     which part of each stored tensor is read
agree      before kernels are bound: whose inputs are rounded together
connect    after kernels are bound: the exchanges between ranks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from portable_dit.models.spec import TensorSplit
from portable_dit.ops import ExpertLinear
from portable_dit.parallel.collectives import Group
from portable_dit.parallel.mesh import Mesh
from portable_dit.parallel.sequence import AttendWithLse, parallelize_sequence
from portable_dit.parallel.tensor import (
    share_input_scales,
    share_scales_of_rows,
    shares_of,
    shrink,
    sum_results,
)
from portable_dit.quantize import QuantizedExpertLinear, QuantizedLinear, expert_names
from portable_dit.shares import Share

GROUP_OF = {"dit": "tensor", "text_encoder": "text"}  # the VAE is whole on every rank


class Parts:
    """See above. splits: the spec's tensor plan."""

    def __init__(self, mesh: Mesh, splits: Sequence[TensorSplit]) -> None:
        self._mesh = mesh
        self._splits = splits
        self._expert = mesh.group("expert").size

    def shrink(self, name: str, module: nn.Module) -> None:
        """Makes the divided layers of a component as small as this rank's part."""
        group = self._group(name)
        if group is not None:
            shrink(module, self._of(name), group, expert=self._expert)

    def shares(self, name: str, module: nn.Module) -> Mapping[str, Share]:
        """What this rank reads of the divided parameters; the others it reads whole."""
        group = self._group(name)
        if group is None:
            return {}
        formats = {
            path: layer.kernel.format.name
            for path, layer in module.named_modules()
            if isinstance(layer, QuantizedLinear | QuantizedExpertLinear)
        }
        alike = self._mesh.group("experts_alike")
        return shares_of(module, self._of(name), group, formats, expert=self._expert, experts_alike=alike)

    def elsewhere(self, name: str, module: nn.Module) -> set[str]:
        """Weights of experts that other ranks hold, which this one leaves in the files."""
        counts = {split.pattern: split.experts for split in self._of(name) if split.experts}
        absent: set[str] = set()
        for path, layer in module.named_modules():
            if isinstance(layer, ExpertLinear | QuantizedExpertLinear):
                count = next(n for pattern, n in counts.items() if fnmatchcase(path, pattern))
                held = expert_names(path, layer.first, layer.num_experts)
                absent |= {*expert_names(path, 0, count)} - {*held}
        return absent

    def label(self, name: str) -> str:
        """Which part of a component this rank holds, in words; "" for all of it."""
        group = self._group(name)
        return "" if group is None else f"{group.index + 1} of {group.size}"

    def is_first_with_its_part(self, name: str) -> bool:
        """Whether no rank before this one holds the same part, so that files are written once."""
        group = self._group(name)
        return self._mesh.rank == (0 if group is None else group.index)  # both groups are of neighbours

    def all_have(self, found: bool) -> bool:
        """Whether all ranks say yes: what only some have would leave the others waiting for an exchange."""
        return self._mesh.all(found)

    def agree(self, name: str, module: nn.Module, blocks: nn.Module) -> None:
        """Has quantised layers ask the ranks that hold the rest of their input; blocks: as in `connect`."""
        group, sequence = self._group(name), self._mesh.group("sequence")
        if group is not None:
            alike = self._mesh.group("experts_alike")
            share_input_scales(module, self._of(name), group, experts_alike=alike)
        if name == "dit" and sequence.size > 1:
            share_scales_of_rows(blocks, sequence)

    def connect(
        self, name: str, module: nn.Module, blocks: nn.Module, attend_with_lse: AttendWithLse | None
    ) -> None:
        """Puts the exchanges around a component's layers; blocks: where rows are split, in the DiT."""
        group = self._group(name)
        if group is not None:
            sum_results(module, self._of(name), group)
        if name == "dit" and self._mesh.group("sequence").size > 1:
            parallelize_sequence(blocks, self._mesh, attend_with_lse)

    def _of(self, name: str) -> list[TensorSplit]:
        return [split for split in self._splits if split.component == name]

    def _group(self, name: str) -> Group | None:
        """The ranks that divide the component's layers, None when each has all of it."""
        if name not in GROUP_OF:
            return None
        group = self._mesh.group(GROUP_OF[name])
        return group if group.size > 1 else None
