"""Masks as plain calls, and the kernels that backends share, against the plain body on the host."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend

from portable_dit.capabilities import AttentionRequest
from portable_dit.conformance.attention import check_attention
from portable_dit.cpu import CpuBackend
from portable_dit.masks import Causal, CausalWithFullSpans, NoMask, Segments, to_keep
from portable_dit.pieces import pieces
from portable_dit.piecewise import ALL_MASKS, ChunkedAttention, SdpaAttention, sorted_keys

CPU = CpuBackend()
HOST = CPU.devices()[0]
CAN = CPU.capabilities(HOST)
EVERY = frozenset({"float32", "bfloat16", "float16"})


def seen_by(mask, rows_q: int, rows_k: int) -> torch.Tensor:
    """What the pieces of a mask let each query see: bool [Sq, Sk]. No row may be computed twice."""
    seen = torch.zeros(rows_q, rows_k, dtype=torch.int32)
    for piece in pieces(mask, rows_q, rows_k):
        rows, keys = piece.stop - piece.start, piece.last - piece.first
        block = torch.ones(rows, keys, dtype=torch.int32)
        if piece.causal:
            block = block.tril(keys - rows)
        seen[piece.start : piece.stop, piece.first : piece.last] += block
    assert int(seen.max()) <= 1
    return seen.bool()


@st.composite
def masks(draw) -> tuple[object, int, int]:
    rows_k = draw(st.integers(1, 40))
    rows_q = draw(st.integers(1, rows_k))
    kind = draw(st.sampled_from(["none", "causal", "spans", "segments"]))
    if kind == "none":
        return NoMask(), rows_q, rows_k
    if kind == "causal":
        return Causal(), rows_q, rows_k
    if kind == "spans":
        cuts = sorted(draw(st.lists(st.integers(0, rows_k), max_size=6)))
        spans = tuple(zip(cuts[::2], cuts[1::2], strict=False))
        return CausalWithFullSpans(spans), rows_q, rows_k
    cuts = sorted({0, rows_k, *draw(st.lists(st.integers(0, rows_k), max_size=4))})
    lengths = tuple(b - a for a, b in pairwise(cuts))
    return Segments(lengths, torch.tensor(cuts, dtype=torch.int32)), rows_q, rows_k


@given(masks())
def test_the_pieces_of_a_mask_are_the_mask(case):
    mask, rows_q, rows_k = case
    keep = to_keep(mask, rows_q, rows_k, torch.device("cpu"))
    wanted = torch.ones(rows_q, rows_k, dtype=torch.bool) if keep is None else keep.expand(rows_q, rows_k)
    assert torch.equal(seen_by(mask, rows_q, rows_k), wanted)


@pytest.mark.parametrize(
    "kernel",
    [
        ChunkedAttention(),
        SdpaAttention("sdpa_math", SDPBackend.MATH, dtypes=EVERY),
        SdpaAttention("sdpa_flash", SDPBackend.FLASH_ATTENTION, dtypes=EVERY),
        SdpaAttention("sdpa_apart", SDPBackend.FLASH_ATTENTION, dtypes=EVERY, grouped=False),
    ],
    ids=lambda kernel: kernel.id,
)
def test_shared_kernels_pass_conformance_on_the_host(kernel):
    found = check_attention(kernel, CPU, HOST, CAN, "float32")
    assert not [outcome for outcome in found if outcome.status == "fail"]
    assert sum(outcome.status == "pass" for outcome in found) > 15


def test_bounded_memory_gives_the_numbers_of_one_pass(monkeypatch):
    q, k, v = torch.randn(3, 2, 90, 4, 32, generator=torch.Generator().manual_seed(0))
    whole = ChunkedAttention().run_with_lse(q, k, v, Causal(), scale=0.2)
    monkeypatch.setattr("portable_dit.piecewise.CHUNK_BYTES", 1)
    for found, wanted in zip(
        ChunkedAttention().run_with_lse(q, k, v, Causal(), scale=0.2), whole, strict=True
    ):
        torch.testing.assert_close(found, wanted)


def test_kept_keys_come_first_in_order_with_their_count():
    k = torch.arange(12.0).view(2, 3, 1, 2)
    keep = torch.tensor([[False, True, True], [True, False, False]])
    keys, values, used = sorted_keys(k, -k, keep)
    assert used.tolist() == [2, 1]
    assert used.dtype is torch.int32
    assert torch.equal(keys[0, :2], k[0, 1:])
    assert torch.equal(values, -keys)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"head_dim": 260}, "head_dim"),
        ({"head_dim": 60}, "head_dim"),
        ({"num_kv_heads": 3}, "heads"),
        ({"mask": "key_padding"}, "mask"),
        ({"return_lse": True}, "lse"),
    ],
)
def test_a_kernel_refuses_with_the_rule_that_is_broken(change, code):
    kernel = SdpaAttention("x", SDPBackend.MATH, masks=ALL_MASKS - {"key_padding"})
    asked = {"dtype": "bfloat16", "head_dim": 64, "num_heads": 8, "num_kv_heads": 8, "rows": 9}
    assert kernel.check(AttentionRequest(**asked), CAN) is None
    assert kernel.check(AttentionRequest(**asked | change), CAN).code == code
