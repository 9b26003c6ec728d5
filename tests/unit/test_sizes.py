"""Rules for sides: the canvas that stands in for a wish, against all that the rules allow."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portable_dit.models.sizes import SizeRules
from portable_dit.request import size_problem

# Of few canvases, so that all can be tried: tight and loose, with limits that are no multiples.
RULES = st.builds(
    SizeRules,
    multiple=st.sampled_from([16, 32]),
    min_side=st.integers(1, 128),
    max_side=st.integers(128, 512),
    max_pixels=st.integers(128 * 128, 512 * 512),
    max_ratio=st.sampled_from([1.0, 1.5, 16 / 9, 2.0, 3.0, 7.5]),
    default=st.just((128, 128)),
)
SIDES = st.integers(-10, 1200) | st.integers(-(10**9), 10**9)


def canvases(rules: SizeRules) -> list[tuple[int, int]]:
    sides = range(rules.multiple, rules.max_side + 1, rules.multiple)
    return [(w, h) for w in sides for h in sides if size_problem(w, h, rules) is None]


@given(rules=RULES, width=SIDES | st.floats(1, 1200), height=SIDES | st.floats(1, 1200))
def test_no_canvas_is_nearer_in_ratio_twice_and_in_area_than_the_nearest(rules, width, height):
    ratio = max(width, 1) / max(height, 1)
    ratio = min(max(ratio, 1 / rules.max_ratio), rules.max_ratio)
    area = max(width, 1) * max(height, 1)
    area = min(max(area, rules.min_side**2 * max(ratio, 1 / ratio)), rules.max_pixels)

    def distance(size: tuple[int, int]) -> float:
        return 2 * abs(math.log(size[0] / size[1] / ratio)) + abs(math.log(size[0] * size[1] / area))

    legal, nearest = canvases(rules), rules.nearest(width, height)
    assert nearest in legal
    assert distance(nearest) == pytest.approx(min(map(distance, legal)), abs=1e-9)


@pytest.mark.parametrize(
    ("rules", "wish", "nearest"),
    [
        # Of the widths beside 1842, 1856 has the ratio with a height that is two steps away.
        (SizeRules(32, 256, 8192, 20_000_000, 3.0, (2048, 2048)), (1842, 5501), (1856, 5536)),
        # At the least side, where nothing but the other one gives way.
        (SizeRules(16, 100, 700, 90_000, 7.5, (128, 128)), (91, 247), (112, 304)),
        (SizeRules(32, 256, 8192, 20_000_000, 3.0, (2048, 2048)), (3000, 1000), (2976, 992)),
    ],
)
def test_the_ratio_is_kept_where_the_area_must_give_way(rules, wish, nearest):
    assert rules.nearest(*wish) == nearest
    assert rules.nearest(*wish[::-1]) == nearest[::-1]


@given(rules=RULES, data=st.data())
def test_a_canvas_is_its_own_nearest_and_closest(rules, data):
    size = data.draw(st.sampled_from(canvases(rules)))
    assert rules.nearest(*size) == rules.closest(*size) == size


@pytest.mark.parametrize(
    ("asked", "closest"),
    [
        ((33, 64), (64, 64)),
        ((64, 33), (64, 64)),
        ((100, 100), (96, 96)),
        ((500, 500), (256, 256)),
        ((65, 129), (64, 128)),
    ],
)
def test_the_size_that_is_offered_differs_least_in_its_sides(asked, closest):
    rules = SizeRules(32, 64, 512, 256 * 256, 2.0, (96, 64))
    assert rules.closest(*asked) == closest


@given(rules=RULES, width=SIDES, height=SIDES)
def test_no_canvas_is_closer_than_the_one_that_is_offered(rules, width, height):
    def difference(size: tuple[int, int]) -> float:
        return math.log(size[0] / max(width, 1)) ** 2 + math.log(size[1] / max(height, 1)) ** 2

    legal, closest = canvases(rules), rules.closest(width, height)
    assert closest in legal
    assert difference(closest) == pytest.approx(min(map(difference, legal)), abs=1e-9)


@given(rules=RULES)
def test_no_canvas_has_more_pixels_than_the_largest(rules):
    legal = canvases(rules)
    assert rules.largest in legal
    assert math.prod(rules.largest) == max(map(math.prod, legal))


def test_rules_that_allow_no_canvas_have_their_default_for_any_wish():
    rules = SizeRules(32, 600, 512, 512 * 512, 2.0, (512, 512))
    assert rules.largest == rules.nearest(100, 300) == rules.closest(100, 300) == (512, 512)
