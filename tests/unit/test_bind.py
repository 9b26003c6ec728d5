"""Binding kernels to seams."""

from __future__ import annotations

import pytest
from torch import nn

from portable_dit import cpu, ops
from portable_dit.bind import bind
from portable_dit.cpu import CpuBackend
from portable_dit.errors import BackendError


def model() -> nn.Module:
    return nn.ModuleDict(
        {
            "attention": ops.Attention(4, 8),
            "inner": nn.ModuleList([ops.Attention(4, 8), ops.ModulatedNorm(8, 1e-6), ops.SwiGLU()]),
        }
    )


def test_every_seam_of_a_chosen_op_gets_the_kernel_and_the_others_stay_plain() -> None:
    net = model()
    chosen = {
        "attention": "sdpa_math",
        "swiglu": "plain",
        "linear:int8_row": "int8_matmul",
        "rms_norm": "one_pass",
    }
    assert bind(net, CpuBackend(), chosen) == {"attention": 2, "rms_norm": 0}
    runs = [seam.run for seam in net.modules() if isinstance(seam, ops.Attention)]
    assert len(runs) == 2
    assert all(run.__self__.id == "sdpa_math" for run in runs)
    assert net["inner"][1].run is ops.norm_modulate
    assert net["inner"][2].run is ops.swiglu
    bind(net, CpuBackend(), {"swiglu": "in_place"})
    assert net["inner"][2].run is cpu.swiglu


def test_an_unknown_kernel_names_the_near_one() -> None:
    with pytest.raises(BackendError, match=r"attention kernel 'sdpa_flas'.*Did you mean 'sdpa_flash'"):
        bind(model(), CpuBackend(), {"attention": "sdpa_flas"})
    with pytest.raises(BackendError, match=r"swiglu kernel 'x' does not exist.*in_place"):
        bind(model(), CpuBackend(), {"swiglu": "x"})
