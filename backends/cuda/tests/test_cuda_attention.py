"""Attention kernels against the conformance oracle, over stand-ins for the vendors' functions."""

from __future__ import annotations

import pytest
import torch
from portable_dit_cuda.attention import OnChips, TorchAttention
from portable_dit_cuda.flash import FA3, FA4, Fa3Fp8Attention, SageAttention
from torch.nn.attention import SDPBackend

from portable_dit import piecewise
from portable_dit.backend import AttentionKernel
from portable_dit.capabilities import AttentionRequest
from portable_dit.conformance.attention import CASES, check_attention
from portable_dit.cpu import CpuBackend
from portable_dit.masks import (
    NO_MASK,
    Causal,
    CausalWithFullSpans,
    KeyPadding,
    Mask,
    NoMask,
    Segments,
    to_keep,
)
from portable_dit.pieces import pieces
from portable_dit.piecewise import ChunkedAttention, sorted_keys

CPU = CpuBackend()
HOST = CPU.devices()[0]
# On a CPU only the open implementation takes masks of every kind; what is tested is what is put around it.
SDPA = TorchAttention("sdpa", SDPBackend.MATH)


def outcomes(kernel: AttentionKernel, capabilities, dtype: str = "bfloat16"):
    return {o.case: o for o in check_attention(kernel, CPU, HOST, capabilities, dtype)}


@pytest.mark.parametrize(
    ("kernel", "on", "libraries"),
    [
        (FA3, "h200", {"fa3_fwd": "0.0.3"}),
        (SDPA, "h200", {}),
        (ChunkedAttention(), "h200", {}),
    ],
    ids=lambda value: getattr(value, "id", None),
)
def test_a_kernel_serves_every_mask_and_shape_exactly(kernel, on, libraries, machine, stand_ins):
    found = outcomes(kernel, machine(on, **libraries))
    assert {o.status for o in found.values()} == {"pass"}, [o for o in found.values() if o.status != "pass"]
    assert len(found) == len(CASES)


def test_fa4_serves_what_it_accepts(machine, stand_ins):
    from dataclasses import replace

    hopper = machine("h200", flash_attn_4="4.0.0b36")
    blackwell = replace(hopper, device=replace(hopper.device, arch="sm_100"))
    found = outcomes(FA4, blackwell)
    assert [n for n, o in found.items() if o.status != "pass"] == ["head_dim_256"]
    assert {o.status for o in outcomes(FA4, hopper).values()} == {"not_claimed"}


def test_sage_is_right_where_it_is_allowed_and_only_by_name(machine, stand_ins):
    kernel = SageAttention()
    found = outcomes(kernel, machine("h200", sageattention="1.0.6"))
    assert {n for n, o in found.items() if o.status == "pass"} >= {
        "plain",
        "causal_fewer_queries",
        "full_spans",
    }
    assert not any(o.status == "fail" for o in found.values())
    assert not kernel.exact


def test_fp8_attention_hands_over_scales_that_undo_its_rounding(machine, stand_ins):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 64, n, 128, generator=generator).bfloat16() for n in (4, 2, 2))
    q[1, :, 2] *= 50  # a head that would round all others away if they shared its scale
    got = Fa3Fp8Attention().run(q, k, v, NO_MASK, scale=0.05).float()
    wanted = AttentionKernel().run(q, k, v, NO_MASK, scale=0.05).float()
    error = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error[0].median() < 0.06
    given = stand_ins.calls[-1][1]
    assert given["q"].dtype == torch.float8_e4m3fn
    assert given["q_descale"].dtype == torch.float32


def test_log_sum_exp_comes_from_the_library_and_from_the_open_kernel_alike(machine, stand_ins):
    q, k, v = torch.randn(3, 2, 40, 4, 64).bfloat16()
    out, lse = FA3.run_with_lse(q, k, v, NO_MASK, scale=0.1)
    plain_out, plain_lse = ChunkedAttention().run_with_lse(q, k, v, NO_MASK, scale=0.1)
    assert torch.allclose(lse, plain_lse, atol=1e-4)
    assert torch.allclose(out.float(), plain_out.float(), atol=0.02)
    request = AttentionRequest("bfloat16", 64, 4, 4, 40, "causal", return_lse=True)
    assert FA3.check(request, machine("h200", fa3_fwd="0.0.3")).code == "lse"


def test_the_open_kernel_gives_the_same_in_small_chunks(monkeypatch):
    q, k, v = torch.randn(3, 1, 90, 2, 32)
    mask = CausalWithFullSpans(((10, 40), (60, 75)))
    whole = ChunkedAttention().run(q, k, v, mask, scale=0.2)
    monkeypatch.setattr(piecewise, "CHUNK_BYTES", 1)
    assert torch.allclose(ChunkedAttention().run(q, k, v, mask, scale=0.2), whole, atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "rows_q", "rows_k"),
    [
        (NoMask(), 3, 5),
        (Causal(), 6, 6),
        (Causal(), 3, 7),
        (Causal(), 7, 3),
        (CausalWithFullSpans(()), 5, 5),
        (CausalWithFullSpans(((2, 5), (7, 9))), 12, 12),
        (CausalWithFullSpans(((0, 4), (4, 8))), 8, 8),
        (CausalWithFullSpans(((2, 6), (4, 9))), 12, 12),  # they overlap
        (CausalWithFullSpans(((1, 9), (3, 5))), 12, 12),  # one inside the other
        (CausalWithFullSpans(((6, 9), (2, 4))), 12, 12),  # out of order
        (CausalWithFullSpans(((2, 5), (7, 9))), 4, 12),
        (Segments((3, 1, 4), torch.tensor([0, 3, 4, 8], dtype=torch.int32)), 8, 8),
        (Segments((3, 1, 4), torch.tensor([0, 3, 4, 8], dtype=torch.int32)), 5, 8),
    ],
    ids=repr,
)
def test_the_pieces_of_a_mask_cover_just_what_it_keeps(mask: Mask, rows_q: int, rows_k: int):
    keep = to_keep(mask, rows_q, rows_k, torch.device("cpu"))
    wanted = torch.ones(rows_q, rows_k, dtype=torch.bool) if keep is None else keep
    covered = torch.zeros(rows_q, rows_k, dtype=torch.int)
    for piece in pieces(mask, rows_q, rows_k):
        seen = torch.ones(piece.stop - piece.start, piece.last - piece.first, dtype=torch.int)
        if piece.causal:
            seen = seen.tril(seen.shape[1] - seen.shape[0])
        covered[piece.start : piece.stop, piece.first : piece.last] += seen
    assert torch.equal(covered, wanted.int())


def test_kept_keys_come_first_and_in_order():
    keep = torch.tensor([[True, False, True], [False, False, True]])
    k = torch.arange(6.0).view(2, 3, 1, 1)
    first, second, used = sorted_keys(k, k * 10, keep)
    assert first[0, :2].flatten().tolist() == [0, 2]
    assert second[1, 0].item() == 50
    assert used.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("kernel", "on", "libraries", "request_", "code"),
    [
        (FA3, "h200", {}, ("bfloat16", 128), "library"),
        (FA3, "rtx-5090", {"fa3_fwd": "0.0.3"}, ("bfloat16", 128), "arch"),
        (FA3, "h200", {"fa3_fwd": "0.0.3"}, ("float16", 128), "dtype"),
        (FA3, "h200", {"fa3_fwd": "0.0.3"}, ("bfloat16", 320), "head_dim"),
        (FA3, "h200", {"fa3_fwd": "0.0.3"}, ("bfloat16", 100), "head_dim"),
        (SDPA, "h200", {}, ("float32", 64), "dtype"),
        (Fa3Fp8Attention(), "h200", {"fa3_fwd": "0.0.3"}, ("bfloat16", 96), "head_dim"),
    ],
)
def test_a_kernel_refuses_with_the_reason(kernel, on, libraries, request_, code, machine):
    dtype, head_dim = request_
    reject = kernel.check(AttentionRequest(dtype, head_dim, 8, 8, 100), machine(on, **libraries))
    assert reject is not None
    assert reject.code == code


def test_an_entry_without_a_key_gives_zeros_whatever_the_library_gives():
    class Careless(OnChips):
        def padded(self, q, k, v, keep, *, scale):
            return torch.full_like(q, torch.nan)

    keep = torch.tensor([[False, False], [True, False]])
    out = Careless().run(*torch.randn(3, 2, 2, 1, 8), KeyPadding(keep), scale=1.0)
    assert (out[0] == 0).all()
    assert out[1].isnan().all()
