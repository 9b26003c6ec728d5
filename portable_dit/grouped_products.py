"""Products of all experts of a mixture in one call, through torch's own grouped products.

They take rows ordered by expert and the place where each expert's rows end, on the device, so nothing of the
routing goes to the host, and a step's blocks can be captured. A backend lists them where its build of torch
has the calls for its device.

Letters: M rows, R rows ordered by expert, E experts, N out features, K in features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_dit.backend import ExpertKernel, Packed
from portable_dit.formats import Agree, Encoded
from portable_dit.scaled_products import ScaledRowLinear

if TYPE_CHECKING:
    from portable_dit.ops import Dispatch


def grouped_linear(x: Tensor, weight: Tensor, dispatch: Dispatch) -> Tensor:
    """`ops.expert_linear` in one call: x [M, K], weight [E, N, K] -> [R, N]."""
    rows = x if dispatch.rows is None else x[dispatch.rows]  # [R, K]
    return F.grouped_mm(rows, weight.transpose(1, 2), offs=dispatch.ends)


class GroupedRowExperts(ExpertKernel):
    """e4m3 with a scale for each input row and each output channel of each expert.

    The input is quantised before it is dealt out, so a row that k experts see is quantised once and moves as
    bytes.
    """

    def __init__(self, linear: ScaledRowLinear, id: str = "scaled_grouped_mm") -> None:
        super().__init__(linear, id)
        self._rows = linear

    def pack(self, weight: Encoded, dtype: torch.dtype) -> Packed:
        assert weight.scales is not None
        return {"values": weight.values, "scales": weight.scales.reshape(-1)}  # [N, K] and [N]

    def apply(self, x: Tensor, packed: Packed, dispatch: Dispatch, out_features: int) -> Tensor:
        values, scales = self._rows.quantize_input(x)  # [M, K], [M, 1]
        return self.apply_quantized(values, scales, packed, dispatch, out_features, x.dtype)

    def apply_divided(
        self, x: Tensor, packed: Packed, dispatch: Dispatch, out_features: int, agree: Agree
    ) -> Tensor:
        values, scales = self._rows.quantize_divided(x, agree)
        return self.apply_quantized(values, scales, packed, dispatch, out_features, x.dtype)

    def apply_quantized(
        self,
        values: Tensor,
        scales: Tensor,
        packed: Packed,
        dispatch: Dispatch,
        out_features: int,
        dtype: torch.dtype,
    ) -> Tensor:
        if dispatch.rows is not None:
            # As bytes: not every build of torch picks rows of 8-bit floats.
            values = values.view(torch.uint8)[dispatch.rows].view(values.dtype)
            scales = scales[dispatch.rows]
        return self.multiply(values, scales, packed, dispatch, dtype)

    def multiply(
        self, values: Tensor, scales: Tensor, packed: Packed, dispatch: Dispatch, dtype: torch.dtype
    ) -> Tensor:
        """Rows that are dealt out, values [R, K] and scales [R, 1], times their experts' weights: [R, N]."""
        by_row = F.ScalingType.RowWise
        out: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]  # torch's own stubs lack it
            values,
            packed["values"].transpose(1, 2),  # [E, K, N], column-major
            scale_a=scales.reshape(-1),
            scale_recipe_a=by_row,
            scale_b=packed["scales"],
            scale_recipe_b=by_row,
            offs=dispatch.ends,
            output_dtype=dtype,
            use_fast_accum=self._rows.fast_accumulation,
        )
        return out
