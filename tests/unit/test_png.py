"""PNG files that any decoder reads back exactly."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from portable_dit.png import encode_png


def decoded(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        image.verify()
    with Image.open(io.BytesIO(data)) as image:
        assert image.mode == "RGB"
        return np.asarray(image)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("height", "width"), [(1, 1), (1, 7), (7, 1), (2, 3), (33, 31), (513, 511), (1, 5000), (5000, 1)]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_any_size_comes_back_exactly_through_pillow(height, width, threads):
    for pixels in (noise(height, width), np.full((height, width, 3), 200, np.uint8)):
        assert np.array_equal(decoded(encode_png(pixels, threads=threads)), pixels)


@settings(max_examples=40, deadline=None)
@given(height=st.integers(1, 70), width=st.integers(1, 70), step=st.integers(0, 5), seed=st.integers(0, 99))
def test_smooth_and_noisy_pictures_come_back_exactly(height, width, step, seed):
    ramp = np.add.outer(np.arange(height), np.arange(width))[..., None] * np.array([1, 2, 3])
    pixels = (ramp * step + noise(height, width, seed) % (step + 1)).astype(np.uint8)
    assert np.array_equal(decoded(encode_png(pixels)), pixels)


def test_a_picture_of_many_bands_is_one_stream_with_a_right_checksum():
    smooth = np.linspace(0, 255, 3000 * 1500 * 3).reshape(3000, 1500, 3).astype(np.uint8)
    smooth[1000:2000, 300:900] = noise(1000, 600)
    assert np.array_equal(decoded(encode_png(smooth, threads=2)), smooth)
    assert encode_png(smooth, threads=2) == encode_png(smooth, threads=1)


def test_a_picture_that_is_a_slice_of_another_comes_back_exactly():
    pixels = noise(40, 60)[::2, 5:50]
    assert np.array_equal(decoded(encode_png(pixels)), pixels)


def test_flat_art_takes_less_than_a_hundredth_of_its_raw_size():
    pixels = np.full((512, 512, 3), (240, 240, 255), np.uint8)
    pixels[100:300, 50:400] = (200, 30, 40)
    pixels[200:480, 200:300] = (20, 160, 60)
    assert len(encode_png(pixels)) < pixels.nbytes / 100


def test_text_in_any_script_is_read_back_by_pillow():
    text = {"plain": "a red apple", "latin": "é ü\nnew line", "wide": "猫 🐱 яблоко"}
    with Image.open(io.BytesIO(encode_png(noise(2, 2), text))) as image:
        assert image.text == text


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((2, 2, 4), np.uint8),
        np.zeros((2, 2), np.uint8),
        np.zeros((2, 2, 3), np.float32),
        np.zeros((0, 2, 3), np.uint8),
    ],
)
def test_anything_but_rgb_bytes_is_refused(pixels):
    with pytest.raises(ValueError, match="uint8 RGB"):
        encode_png(pixels)
