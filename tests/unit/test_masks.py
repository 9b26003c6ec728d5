"""Masks against their definition, spelled out pair by pair."""

from __future__ import annotations

import pytest
import torch

from portable_dit.conformance.attention import CASES, AttentionCase, build_mask, seen_keys
from portable_dit.masks import NO_MASK, Causal, to_keep

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", [c for c in CASES if c.mask != "none"], ids=lambda c: c.name)
def test_a_mask_keeps_exactly_the_pairs_of_its_definition(case: AttentionCase) -> None:
    keep = to_keep(build_mask(case, CPU), *case.rows, CPU)
    assert keep is not None
    assert keep.dtype == torch.bool
    wanted = seen_keys(case)[:, None]  # [B, 1, Sq, Sk]
    assert torch.equal(keep.expand(wanted.shape), wanted)


def test_no_mask_is_none_so_that_nothing_is_built() -> None:
    assert to_keep(NO_MASK, 5, 7, CPU) is None


def test_causal_is_aligned_at_the_last_key() -> None:
    keep = to_keep(Causal(), 2, 5, CPU)
    assert keep is not None
    assert keep.tolist() == [[True, True, True, True, False], [True] * 5]
