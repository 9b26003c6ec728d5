"""A rank's share of a weight: found among stored rows in any order, and read without the rest."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from portable_dit.formats import encode
from portable_dit.models.h3_image.checkpoint import stack_qkv_rows, swap_halves
from portable_dit.models.spec import TensorSource
from portable_dit.safetensors_file import open_tensor_file
from portable_dit.shares import Share
from portable_dit.weights import Made

HEADS, ROWS, COLUMNS = 4, 24, 12
MAKES = {
    "as stored": (("a",), lambda a: a),
    "heads put together": (("a",), lambda a: stack_qkv_rows(a, HEADS)),
    "halves exchanged": (("a",), swap_halves),
    "three joined": (("a", "b", "c"), lambda *parts: torch.cat(parts)),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    path = tmp_path_factory.mktemp("shares") / "model.safetensors"
    save_file({name: torch.randn(ROWS, COLUMNS, generator=generator) for name in "abc"}, path)
    return open_tensor_file(path).tensors


def ranges_of(whole: int, parts: int, rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """The rank's part of each of `parts` equal things that are fused."""
    each, step = whole // parts, whole // parts // size
    return tuple((n * each + rank * step, n * each + (rank + 1) * step) for n in range(parts))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_share_is_that_part_of_the_whole_parameter_and_reads_nothing_else(stored, kind, size, dim):
    names, make = MAKES[kind]
    source = TensorSource(names, make, by_rows=True)
    whole = make(
        *(Made(name, stored, TensorSource((name,), lambda t: t)).read((ROWS, COLUMNS)) for name in names)
    )
    bytes_read = 0
    for rank in range(size):
        parts = 3 if dim == 0 else 1
        ranges = ranges_of(whole.shape[dim], parts, rank, size)
        share = Share(dim, whole.shape[dim], ranges)
        expected = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim=dim)
        made = Made("weight", stored, source, share)
        assert made.runs is not None
        assert torch.equal(made.read(tuple(expected.shape)), expected)
        assert made.is_finite()
        bytes_read += made.nbytes
    assert bytes_read == whole.nbytes


def test_a_source_that_mixes_rows_is_read_whole_and_cut(stored):
    source = TensorSource(("a", "b"), lambda a, b: a + b)
    share = Share(0, ROWS, ((6, 12),))
    made = Made("weight", stored, source, share)
    assert made.runs is None
    whole = Made("weight", stored, source).read((ROWS, COLUMNS))
    assert torch.equal(made.read((6, COLUMNS)), whole[6:12])


def test_a_bias_that_another_rank_adds_is_zeros_here(stored):
    made = Made("bias", stored, TensorSource(("a",), lambda a: a), Share(0, ROWS, ((0, ROWS),), silent=True))
    assert not made.read((ROWS, COLUMNS)).any()


def test_values_that_are_not_finite_are_found_in_the_share_that_has_them(tmp_path):
    bad = torch.ones(ROWS, COLUMNS)
    bad[20, 10] = float("nan")
    save_file({"a": bad}, tmp_path / "model.safetensors")
    stored = open_tensor_file(tmp_path / "model.safetensors").tensors
    source = TensorSource(("a",), lambda a: a, by_rows=True)
    for share, clean in (
        (Share(0, ROWS, ((0, 12),)), True),
        (Share(0, ROWS, ((12, 24),)), False),
        (Share(1, COLUMNS, ((0, 6),)), True),
        (Share(1, COLUMNS, ((6, 12),)), False),
    ):
        assert Made("weight", stored, source, share).is_finite() is clean


@pytest.mark.parametrize("format", ["fp8_row", "int8_row", "fp8_tensor", "fp8_block128", "mxfp8"])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_that_agree_on_the_largest_are_encoded_as_the_whole_is(format, dim):
    """Bits of values and scales, for parts that end where the blocks of the format do."""
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    weight[:, 200] *= 30  # the largest lie in one half
    whole = encode(weight, format)
    halves = weight.chunk(2, dim=dim)
    rows, columns = whole.format.block
    spans = rows == 0 or (dim == 1 and columns == 0)
    largest: list[torch.Tensor] = []
    for half in halves:  # what the ranks would send each other
        encode(half, format, agree=lambda amax: largest.append(amax) or amax)
    agreed = torch.stack(largest).amax(dim=0) if spans else None
    agree = (lambda amax: agreed) if spans else None
    parts = [encode(half, format, agree=agree) for half in halves]
    values = torch.cat([part.values.view(torch.uint8) for part in parts], dim=dim)
    assert torch.equal(values, whole.values.view(torch.uint8))
    scales = [part.scales.view(torch.uint8) for part in parts]
    joined = scales[0] if spans and (dim == 1 or rows == 0) else torch.cat(scales, dim=dim)
    assert torch.equal(joined, whole.scales.view(torch.uint8))
