"""cuDNN's attention in 8 bits, over a stand-in that is strict where the library is."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from cudnn_stand_in import CudnnStandIn, Graph, NotSupportedError
from portable_dit_cuda import cudnn_attention
from portable_dit_cuda.cudnn_attention import CudnnFp8Attention

from portable_dit.backend import AttentionKernel
from portable_dit.capabilities import AttentionRequest
from portable_dit.conformance.attention import check_attention
from portable_dit.cpu import CpuBackend
from portable_dit.errors import BackendError
from portable_dit.masks import NO_MASK, Causal, CausalWithFullSpans

CPU = CpuBackend()
HOST = CPU.devices()[0]
KERNEL = CudnnFp8Attention()


def forget() -> None:
    for remembered in (cudnn_attention._cudnn, cudnn_attention._plan, cudnn_attention._number):
        remembered.cache_clear()


@pytest.fixture(params=["cudnn", "cudnn 1.18"])
def library(monkeypatch, request):
    """The stand-in in the place of the package, in its newest version and in the oldest that we ask for."""
    forget()
    made = CudnnStandIn(request.param)
    monkeypatch.setitem(sys.modules, "cudnn", made)
    yield made
    forget()


def relative(got, wanted):
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact(q, k, v, mask, scale):
    return AttentionKernel().run(q.float(), k.float(), v.float(), mask, scale=scale)


def test_it_serves_every_mask_but_padded_keys_within_the_error_of_its_format(library, machine):
    found = check_attention(KERNEL, CPU, HOST, machine("h200", nvidia_cudnn_frontend="1.32.0"), "bfloat16")
    assert not [o for o in found if o.status == "fail"]
    passed = {o.case for o in found if o.status == "pass"}
    assert passed >= {"plain", "causal_fewer_queries", "full_spans", "segments"}


@pytest.mark.parametrize(("rows_q", "rows_k"), [(64, 64), (1, 40), (2, 2), (40, 7), (33, 90)])
@pytest.mark.parametrize("mask", [NO_MASK, Causal()], ids=["none", "causal"])
def test_any_number_of_rows_and_shared_key_heads_come_out_right(library, rows_q, rows_k, mask):
    q, k, v = random(1, rows_q, 4, 128), random(1, rows_k, 2, 128, seed=1), random(1, rows_k, 2, 128, seed=2)
    got = KERNEL.run(q, k, v, mask, scale=128**-0.5)
    assert got.dtype is torch.bfloat16
    assert relative(got, exact(q, k, v, mask, 128**-0.5)) < 0.08


def test_heads_whose_values_differ_a_thousandfold_keep_their_own_scales(library):
    q, k, v = random(3, 1, 64, 2, 128)
    v[:, :, 0] *= 1000
    got, wanted = KERNEL.run(q, k, v, NO_MASK, scale=0.1), exact(q, k, v, NO_MASK, 0.1)
    assert [relative(got[:, :, n], wanted[:, :, n]) < 0.08 for n in range(2)] == [True, True]


def test_batch_entries_share_no_scale_so_each_is_what_it_is_alone(library):
    q, k, v = random(3, 2, 48, 2, 64)
    q[1] *= 100
    both = KERNEL.run(q, k, v, NO_MASK, scale=0.1)
    for entry in range(2):
        alone = KERNEL.run(*(t[entry : entry + 1] for t in (q, k, v)), NO_MASK, scale=0.1)
        assert torch.equal(both[entry : entry + 1], alone)


def test_a_result_as_large_as_its_largest_value_is_not_cut(library):
    """Where all values are alike a mean is as large as it can be, and the weights' rounding adds to it."""
    for seed in range(5):
        q, k = random(2, 1, 16, 2, 64, seed=seed)
        got = KERNEL.run(q, k, torch.full_like(q, 3.0), NO_MASK, scale=0.1)
        assert (got.float() - 3).abs().max() < 3 * 2**-3.5
    assert 400 < max(library.largest) < 448


def test_a_shape_is_planned_once(library):
    q, k, v = random(3, 1, 32, 2, 64)
    for _ in range(3):
        KERNEL.run(q, k, v, NO_MASK, scale=0.1)
    assert library.planned == [(1, 2, 32, 64)]
    KERNEL.run(*random(3, 1, 33, 2, 64), NO_MASK, scale=0.1)
    assert len(library.planned) == 2


def test_a_mask_in_pieces_is_one_call_for_each(library):
    q, k, v = random(3, 1, 60, 2, 64)
    mask = CausalWithFullSpans(((20, 50),))
    got = KERNEL.run(q, k, v, mask, scale=0.1)
    assert relative(got, exact(q, k, v, mask, 0.1)) < 0.08
    assert len(library.planned) > 1


def test_tensors_that_are_views_of_one_are_read_rightly(library):
    packed = random(1, 40, 3, 2, 64).unbind(2)
    wanted = KERNEL.run(*(t.contiguous() for t in packed), NO_MASK, scale=0.1)
    assert torch.equal(KERNEL.run(*packed, NO_MASK, scale=0.1), wanted)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in packed]
    assert torch.equal(KERNEL.run(*heads_first, NO_MASK, scale=0.1), wanted)


def test_a_call_that_cudnn_has_no_plan_for_is_told(library, monkeypatch):
    def refuse(graph, name):
        raise NotSupportedError("hidden_dim should be a multiple of 16")

    monkeypatch.setattr(Graph, "step", refuse)
    with pytest.raises(BackendError, match=r"cudnn_fp8: cuDNN has no plan .*multiple of 16"):
        KERNEL.run(*random(3, 1, 32, 2, 64), NO_MASK, scale=0.1)


@pytest.mark.parametrize(
    ("arch", "libraries", "head_dim", "code"),
    [
        ("sm_90", {}, 128, "library"),
        ("sm_89", {"nvidia_cudnn_frontend": "1"}, 128, "arch"),
        ("sm_120", {"nvidia_cudnn_frontend": "1"}, 128, "arch"),
        ("sm_90", {"nvidia_cudnn_frontend": "1"}, 72, "head_dim"),
        ("sm_100", {"nvidia_cudnn_frontend": "1"}, 256, "head_dim"),
        ("sm_90", {"nvidia_cudnn_frontend": "1"}, 272, "head_dim"),
    ],
)
def test_it_refuses_with_the_reason(machine, arch, libraries, head_dim, code):
    here = machine("h200", **libraries)
    here = replace(here, device=replace(here.device, arch=arch))
    reject = KERNEL.check(AttentionRequest("bfloat16", head_dim, 8, 8, 100), here)
    assert reject is not None
    assert reject.code == code
    assert not KERNEL.exact
