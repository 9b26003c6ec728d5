"""Formats against an independent formulation: numpy, block by block, rounding by search in a table."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from portable_dit.errors import BackendError, WeightsError
from portable_dit.formats import FORMATS, QUANTIZED, Encoded, decode, encode, format_named
from portable_dit.rotation import rotate

BLOCKS = {  # the definition once more, by hand: rows and columns that share a scale, None = all
    "int8_row": (1, None),
    "int8_row_rotated": (1, None),
    "int8_weight_only": (1, None),
    "fp8_row": (1, None),
    "fp8_weight_only": (1, None),
    "fp8_tensor": (None, None),
    "fp8_block128": (128, 128),
    "mxfp8": (1, 32),
}


def e4m3_values() -> np.ndarray:
    """All finite non-negative e4m3 values, from the bits: 4 of exponent with bias 7, 3 of mantissa."""
    values = []
    for byte in range(0x7F):  # 0x7F is NaN
        exponent, mantissa = byte >> 3, byte & 7
        values.append(mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.array(values)


E4M3 = e4m3_values()


def nearest_e4m3(x: float) -> float:
    """Nearest value, ties to the even mantissa."""
    distance = np.abs(E4M3 - abs(x))
    best = np.flatnonzero(distance == distance.min())
    return math.copysign(float(E4M3[min(best, key=lambda i: i % 2)]), x)


def reference_decode(weight: np.ndarray, name: str) -> np.ndarray:
    """What encode and decode should give, one block and one number at a time, in float64."""
    rows, columns = BLOCKS[name]
    rows, columns = rows or weight.shape[0], columns or weight.shape[1]
    turn = rotation(weight.shape[1]) if FORMATS[name].rotated else np.eye(weight.shape[1])
    weight = (weight.astype(np.float64) @ turn).astype(np.float32)
    out = np.zeros(weight.shape)
    for top in range(0, weight.shape[0], rows):
        for left in range(0, weight.shape[1], columns):
            block = weight[top : top + rows, left : left + columns]
            amax = float(np.abs(block).max())
            if amax == 0:
                continue
            if name == "mxfp8":
                exponent = next(e for e in range(-127, 128) if amax <= 448 * 2.0**e)
                scale = 2.0**exponent
            else:
                scale = float(np.float32(amax) / np.float32(127 if "int8" in name else 448))
            ratio = (block.astype(np.float32) / np.float32(scale)).astype(np.float64)
            if "int8" in name:
                stored = np.clip(np.rint(ratio), -127, 127)
            else:
                stored = np.vectorize(nearest_e4m3)(np.clip(ratio, -448, 448))
            out[top : top + rows, left : left + columns] = stored * scale
    return out @ turn


def rotation(channels: int) -> np.ndarray:
    """The matrix that turns groups of neighbours, written down from its definition, float64 [K, K]."""
    four = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2
    group = np.eye(1)
    while len(group) < 256 and channels % (4 * len(group)) == 0:
        group = np.kron(group, four)
    return np.kron(np.eye(channels // len(group)), group)


def sample(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(3 * torch.randn(rows, 1, generator=generator))
    return torch.randn(rows, columns, generator=generator) * spread


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("shape", [(3, 32), (5, 70), (130, 140), (1, 1)])
def test_a_decoded_weight_is_what_the_definition_gives_number_by_number(
    name: str, shape: tuple[int, int]
) -> None:
    weight = sample(*shape)
    got = decode(encode(weight, name)).double().numpy()
    wanted = reference_decode(weight.numpy(), name)
    # The product value * scale is rounded once to float32; turning it back adds a few roundings more, and on
    # the way there they may push a number over the middle between two steps of a row.
    turned = FORMATS[name].rotated
    np.testing.assert_allclose(got, wanted, rtol=2**-24, atol=2**-18 * np.abs(wanted).max() if turned else 0)


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_error_stays_within_the_documented_bound(name: str) -> None:
    weight = sample(150, 300, seed=1)
    encoded = encode(weight, name)
    form = encoded.format
    assert encoded.scales is not None
    rows, columns = BLOCKS[name]
    scale = encoded.scales.float().repeat_interleave(rows or 150, 0)[:150]
    scale = scale.repeat_interleave(columns or 300, 1)[:, :300]
    decoded = decode(encoded)
    if form.rotated:
        weight, decoded = rotate(weight, 4), rotate(decoded, 4)  # 300 is 75 times four
    bound = torch.maximum(form.relative * weight.abs(), form.absolute * scale)
    assert ((decoded - weight).abs() <= bound * (1 + 2**-16)).all()
    assert ((decoded - weight).abs() > bound * 0.9).any(), "the bound is not sharp"


@pytest.mark.parametrize("name", QUANTIZED)
def test_an_all_zero_weight_and_an_all_zero_row_stay_zero(name: str) -> None:
    assert decode(encode(torch.zeros(4, 64), name)).eq(0).all()
    weight = sample(4, 64)
    weight[2] = 0
    decoded = decode(encode(weight, name))
    assert decoded[2].eq(0).all()
    assert decoded[1].ne(0).any()


@pytest.mark.parametrize("name", ["int8_row", "fp8_row", "mxfp8"])
def test_an_outlier_spoils_only_its_own_block(name: str) -> None:
    weight = sample(4, 64, seed=2)
    clean = decode(encode(weight, name))
    weight[1, 3] = 1e5
    spoiled = decode(encode(weight, name))
    assert torch.equal(clean[[0, 2, 3]], spoiled[[0, 2, 3]])
    if name == "mxfp8":
        assert torch.equal(clean[1, 32:], spoiled[1, 32:])


@pytest.mark.parametrize("magnitude", [3e38, 1e30, 448.0, 449.0, 511.0, 512.0, 1e-30, 1e-37, 1e-40, 1e-45])
@pytest.mark.parametrize("name", QUANTIZED)
def test_extreme_magnitudes_neither_overflow_nor_become_nan(name: str, magnitude: float) -> None:
    weight = torch.tensor([[magnitude, -magnitude / 2, 0.0, magnitude / 3]])
    encoded = encode(weight, name)
    decoded = decode(encoded)
    assert torch.isfinite(decoded).all()
    if magnitude >= 1e-30:
        assert (decoded[0, 0] - magnitude).abs() <= magnitude * 2**-4
    else:
        assert (decoded - weight).abs().max() <= 1e-37


def test_int8_rounds_halves_to_the_even_step() -> None:
    encoded = encode(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]), "int8_row")
    assert encoded.values.tolist() == [[127, 0, 2, 2, 0, -2]]


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_scale_of_an_all_zero_block_is_one(name: str) -> None:
    scales = encode(torch.zeros(3, 40), name).scales
    assert scales is not None
    assert scales.float().eq(1).all()


def test_mxfp8_scales_are_the_least_power_of_two_that_does_not_clip() -> None:
    for amax, exponent in ((448.0, 0), (448.0001, 1), (896.0, 1), (1.75, -8), (1.7500001, -7), (3e38, 120)):
        scales = encode(torch.tensor([[amax, 0.0]]), "mxfp8").scales
        assert scales is not None
        assert scales.view(torch.uint8).item() - 127 == exponent, amax
    smallest = encode(torch.tensor([[1e-45, 0.0]]), "mxfp8").scales
    assert smallest is not None
    assert smallest.view(torch.uint8).item() == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", FORMATS)
def test_inf_and_nan_are_refused_by_every_format(name: str, bad: float) -> None:
    weight = sample(3, 40)
    weight[1, 5] = bad
    with pytest.raises(WeightsError, match=r"1 Inf or NaN.*damaged"):
        encode(weight, name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(3, 40), (129, 257)])
def test_bytes_are_those_of_the_tensors(name: str, shape: tuple[int, int]) -> None:
    encoded = encode(sample(*shape), name)
    held = encoded.values.nbytes + (0 if encoded.scales is None else encoded.scales.nbytes)
    assert FORMATS[name].bytes(*shape) == held


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_bfloat16_weight_is_encoded_as_its_float32_value(name: str) -> None:
    weight = sample(6, 50).bfloat16()
    assert torch.equal(decode(encode(weight, name)), decode(encode(weight.float(), name)))


def test_plain_formats_pass_numbers_through() -> None:
    weight = sample(6, 50)
    assert torch.equal(decode(encode(weight, "float32")), weight)
    assert torch.equal(decode(encode(weight, "bfloat16")), weight.bfloat16().float())


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(QUANTIZED),
    rows=st.integers(1, 140),
    columns=st.integers(1, 140),
    seed=st.integers(0, 9),
)
def test_encoding_twice_changes_nothing_more_than_rounding(
    name: str, rows: int, columns: int, seed: int
) -> None:
    once = decode(encode(sample(rows, columns, seed), name))
    twice = decode(encode(once, name))
    # Turning there and back rounds every number by a little of the largest in its row.
    slack = 2**-20 * float(once.abs().max()) if FORMATS[name].rotated else 0.0
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=slack)


def test_a_checkpoint_with_scales_of_another_shape_or_type_is_refused() -> None:
    good = encode(sample(4, 64), "mxfp8")
    assert good.scales is not None
    with pytest.raises(WeightsError, match="scales"):
        Encoded(good.format, good.values, good.scales.T.contiguous())
    with pytest.raises(WeightsError, match="scales"):
        Encoded(good.format, good.values, good.scales.float())
    with pytest.raises(WeightsError, match="values"):
        Encoded(format_named("int8_row"), good.values, torch.ones(4, 1))
    with pytest.raises(WeightsError, match="only non-empty matrices"):
        encode(torch.ones(3), "fp8_row")


def test_an_unknown_format_names_the_near_one() -> None:
    with pytest.raises(BackendError, match=r"'fp8_rows'.*Did you mean 'fp8_row'"):
        format_named("fp8_rows")
