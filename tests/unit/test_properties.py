"""Any request and any override is taken or refused in words, never anything else; what is taken is legal."""

import string
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portable_dit.catalog import read_spec
from portable_dit.errors import RecipeError, RequestError
from portable_dit.machine_file import load_machine
from portable_dit.plan import make_plan
from portable_dit.recipe import Recipe, load_recipe, make_recipe
from portable_dit.request import Request, parse_aspect_ratio, parse_size, size_problem, validate_request

DATA = Path(__file__).parents[1] / "data"
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 600),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = [
    *(name for name in Recipe.model_fields),
    *("device.count", "layout.tensor", "quantization.dit", "quantization.keep", "offload.vae", "graphs.dit"),
    *("sampling.steps", "sampling.guidance_scale", "measured.a", "device.memory_gib"),
]
KEYS = st.sampled_from(NAMES) | st.text(string.ascii_lowercase + "._ ", max_size=20) | st.text(max_size=8)
EDGES = (
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        3,
        7,
        50,
        1000,
        4096,
        0.5,
        1e-300,
        1e300,
        2**62,
        "",
        "auto",
        "none",
        "\0",
        "日",
    ),
    *("random", "layerwise", "component", "fp8_row", "mxfp8", "int8_row_rotated", "float16", "mp", "ray"),
    *("x" * 500, [], ["*"], ["["], ["**", ""], {}, {"a": [1]}),
)
MACHINES = [load_machine(DATA / "machines" / f"{name}.json") for name in ("cpu-bf16", "h200", "arc-b70")]
QUICK = settings(max_examples=60, deadline=None)


@cache
def mini_spec():
    return read_spec(load_recipe("cpu/h3-mini"))


@cache
def mixture_spec():
    return read_spec(load_recipe("cpu/h3-mini", {"model": "hunyuan-image-3", "weights": "random"}))


SPECS = {"h3-mini": mini_spec, "hunyuan-image-3": mixture_spec}


@QUICK
@given(
    prompt=st.text(max_size=40) | SCALARS,
    wishes=st.fixed_dictionaries(
        {},
        optional={
            "size": VALUES | st.tuples(st.integers(-3, 1200), st.integers(-3, 1200)),
            "aspect_ratio": VALUES | st.from_regex(r"\d{1,2}:\d{1,2}", fullmatch=True),
            "steps": VALUES | st.just(6),
            "guidance_scale": VALUES | st.just(1),
            "seed": VALUES | st.integers(0, 2**63),
            "images": VALUES | st.integers(1, 4),
            "references": VALUES,
            "format": VALUES | st.sampled_from(["png", "jpeg", "webp"]),
        },
    ),
)
def test_any_request_is_legal_or_refused(prompt, wishes):
    spec = mini_spec()
    try:
        resolved = validate_request(Request(prompt, **wishes), spec)
    except RequestError:
        return
    assert size_problem(resolved.width, resolved.height, spec.sizes) is None
    assert type(resolved.seed) is type(resolved.images) is type(resolved.steps) is int
    assert resolved.seed + resolved.images < 2**63
    assert resolved.steps in spec.steps


@pytest.mark.parametrize("key", list(Recipe(model="h3-mini").values()))
def test_any_value_that_a_key_takes_is_planned_or_refused(key):
    """Edges, and what belongs to other keys, for a model of each family on three kinds of machine."""
    planned = 0
    for machine, (model, spec), value in product(MACHINES, SPECS.items(), EDGES):
        keys = {"model": model, "weights": "random", "device.backend": machine.device.backend}
        with suppress(RecipeError):
            plan = make_plan(make_recipe({}, {**keys, key: value}), spec(), machine, None)
            assert plan.bytes.peak > 0
            assert plan.verdict
            planned += 1
    assert planned, "every value was refused, so nothing was tried"


@QUICK
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_overrides_make_a_recipe_or_are_refused(overrides):
    try:
        recipe = load_recipe("cpu/h3-mini", overrides)
    except RecipeError:
        return
    assert len(recipe.digest) == 64
    assert recipe.provenance.keys() == recipe.values().keys()


@QUICK
@given(st.text(max_size=30) | st.from_regex(r"-?\d{1,12}[xX×]-?\d{1,12}", fullmatch=True))
def test_any_text_is_a_size_and_a_ratio_or_refused(text):
    for parse in (parse_size, parse_aspect_ratio):
        try:
            pair = parse(text)
        except RequestError:
            continue
        assert len(pair) == 2


@QUICK
@given(st.text(max_size=60))
def test_any_text_is_a_recipe_file_or_refused(text):
    from portable_dit.recipe import check_recipe
    from portable_dit.yaml_lines import parse_document

    with pytest.raises(RecipeError):
        check_recipe(parse_document(text + "\nzzz: 1"), None, title="any")
