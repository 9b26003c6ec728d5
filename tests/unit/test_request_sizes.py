"""Sizes of H3-Image: names, ratios, and small pictures that are drawn large."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portable_dit.errors import RequestError
from portable_dit.models import read_spec
from portable_dit.request import Request, size_problem, validate_request

SPEC = read_spec("h3-image", "random")
RATIOS = (
    "1:1", "1:2", "2:1", "1:3", "3:1", "2:3", "3:2", "3:4", "4:3", "4:5", "5:4", "9:16", "16:9", "9:21",
    "21:9",
)  # fmt: skip


def sizes(**wish):
    """(drawn, given) of a request, width and height each."""
    request = validate_request(Request("x", **wish), SPEC)
    return (request.width, request.height), request.output_size


@pytest.mark.parametrize(
    ("wish", "drawn", "given"),
    [
        ({}, (2048, 2048), (2048, 2048)),
        ({"resolution": "1K"}, (2048, 2048), (1024, 1024)),
        ({"resolution": "2k"}, (2048, 2048), (2048, 2048)),
        ({"resolution": "4K"}, (4096, 4096), (4096, 4096)),
        ({"resolution": "4K", "aspect_ratio": "21:9"}, (6272, 2688), (6272, 2688)),
        ({"resolution": "4K", "aspect_ratio": "9:21"}, (2688, 6272), (2688, 6272)),
        ({"aspect_ratio": "16:9"}, (2720, 1536), (2720, 1536)),
        ({"resolution": "1K", "aspect_ratio": "16:9"}, (2720, 1536), (1360, 768)),
        ({"size": (1024, 1024)}, (2048, 2048), (1024, 1024)),
        ({"size": (512, 512)}, (2048, 2048), (512, 512)),
        ({"size": (1344, 768)}, (2688, 1536), (1344, 768)),
        ({"size": (1536, 1024)}, (1536, 1024), (1536, 1024)),
        ({"size": (6272, 2688)}, (6272, 2688), (6272, 2688)),
        ({"size": (256, 768)}, (1280, 3840), (256, 768)),
    ],
)
def test_what_is_drawn_and_what_is_given(wish, drawn, given):
    assert sizes(**wish) == (drawn, given)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("tier", "area"), [("2K", 2048**2), ("4K", 4096**2)])
def test_every_ratio_has_about_the_area_of_its_name(ratio, tier, area):
    (width, height), _ = sizes(resolution=tier, aspect_ratio=ratio)
    across, down = map(int, ratio.split(":"))
    assert size_problem(width, height, SPEC.sizes) is None
    assert abs(width * height / area - 1) < 0.03
    assert abs(width / height / (across / down) - 1) < 0.035


def test_a_resolution_alone_takes_the_shape_of_the_first_reference():
    reference = np.zeros((300, 400, 3), np.uint8)
    (width, height), given = sizes(resolution="4K", references=(reference,))
    assert (width, height) == given == (4736, 3552)


@pytest.mark.parametrize(
    ("pixels", "edited"),
    [((3000, 2000), (1248, 832)), ((1024, 1024), (1024, 1024)), ((40, 40), (1024, 1024))],
)
def test_an_edit_has_the_size_of_its_first_reference_after_its_rule(pixels, edited):
    first = np.zeros((pixels[1], pixels[0], 3), np.uint8)
    other = np.zeros((64, 128, 3), np.uint8)
    drawn, given = sizes(references=(first, other))
    assert given == edited == SPEC.reference_size(*pixels, canvas=drawn)
    assert drawn == (2 * edited[0], 2 * edited[1])


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"resolution": "8K"}, "not a size"),
        ({"resolution": "4K", "size": (2048, 2048)}, "size and resolution: both were given"),
        ({"size": (4096, 5120)}, "over this model's 20,000,000"),
        ({"size": (2000, 2048)}, r"multiples of 32.*nearest is"),
        ({"size": (6144, 1984)}, "may differ by 3:1 at most"),
        ({"resolution": "4K", "aspect_ratio": "4:1"}, "may differ by 3:1 at most"),
    ],
)
def test_other_sizes_are_refused_with_the_rule(wish, words):
    with pytest.raises(RequestError, match=words):
        sizes(**wish)


def test_a_model_without_named_sizes_says_so():
    with pytest.raises(RequestError, match="no sizes with a name"):
        validate_request(Request("x", resolution="1K"), read_spec("h3-mini", "builtin"))


@given(width=st.integers(8, 256), height=st.integers(8, 256))
def test_what_is_drawn_is_legal_and_a_whole_multiple_of_what_is_given(width, height):
    size = (width * 32, height * 32)
    if size_problem(*size, SPEC.sizes) is None:
        drawn, out = sizes(size=size)
        assert out == size
        assert size_problem(*drawn, SPEC.sizes) is None
        assert drawn[0] % size[0] == drawn[1] % size[1] == 0
        assert drawn[0] // size[0] == drawn[1] // size[1]
        if size[0] * size[1] > 1024 * 1024 * 5 // 4:
            assert drawn == size
