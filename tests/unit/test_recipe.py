"""Recipes: strict reading, all mistakes at once with their lines, overrides and where values come from."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import assume, example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from portable_dit.cli.options import collect_overrides
from portable_dit.errors import RecipeError
from portable_dit.recipe import Recipe, find_recipe, load_recipe, make_recipe, named_recipes, recipe_schema
from portable_dit.yaml_lines import MAX_BYTES, parse_document, parse_value

ROOT = Path(__file__).parents[2]


def mistakes(tmp_path: Path, text: str | bytes, overrides: dict | None = None) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def loaded(tmp_path: Path, text: str, overrides: dict | None = None) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return load_recipe(path, overrides)


def test_all_mistakes_come_in_one_message_with_their_keys_and_lines(tmp_path):
    text = """\
model: h3-mini
layout:
  tenser: 2
  ulysses: "4"
offload: {dit: off}
precison: bfloat16
graphs: 3
quantization: {dit: fp9, keep: a}
sampling: {steps: 0, guidance_scale: .nan}
device: {memory_gib: -1}
"""
    said = mistakes(tmp_path, text)
    assert "10 mistakes" in said
    for line, key, words in (
        (3, "layout.tenser", "Did you mean 'tensor'?"),
        (4, "layout.ulysses", "whole number"),
        (5, "offload.dit", "'layerwise'"),
        (6, "precison", "Did you mean 'precision'?"),
        (7, "graphs", "mapping"),
        (8, "quantization.dit", "'fp8_row'"),
        (8, "quantization.keep", "list"),
        (9, "sampling.steps", "at least 1"),
        (9, "sampling.guidance_scale", "finite"),
        (10, "device.memory_gib", "above 0"),
    ):
        assert re.search(rf"line {line}: {re.escape(key)}: .*{re.escape(words)}", said), (line, key, said)


def test_mistakes_of_the_file_and_of_the_flags_are_told_together(tmp_path):
    overrides = {"layout.ring": "x", "foo.bar": 1, "attention": "", "precision.deep": 1}
    said = mistakes(tmp_path, "model: h3-mini\nsteps: 6\nprecision: auto\n", overrides)
    assert "line 2: steps: unknown key" in said
    assert "layout.ring: 'x' must be a whole number (given as a flag)" in said
    assert "foo: unknown key" in said
    assert "attention: must not be empty (given as a flag)" in said
    assert "precision.deep: precision is a single value" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("- model: h3-mini\n", "must hold `key: value` lines"),
        ("h3-mini\n", "must hold `key: value` lines"),
        ("model: h3-mini\n  layout: {\n", "line 2: this is not YAML"),
        ("model: [h3-mini\n", "this is not YAML"),
        ("model: h3-mini\n---\nmodel: h3-mini\n", "this is not YAML"),
        ("weights: x\n", "model: missing"),
        ("model: h3-mini\nmodel: h3-image\n", "line 2: model: the key stands here a second time"),
        ("model: h3-mini\nlayout: {tensor: 1, tensor: 2}\n", "line 2: layout.tensor: the key stands here a"),
        ("model: h3-mini\nlayout: &a {tensor: 1}\noffload: *a\n", "anchors and aliases"),
        ("model: !!python/object:os.system x\n", "line 1: model: this value cannot be read"),
        ("model: h3-mini\n1: 2\n", "line 2: the key '1' must be plain text"),
        ("model:\n", "line 1: model: null must be text"),
        (b"\x89PNG\r\n\x1a\n\0\0\xff\xfe", "not UTF-8 text"),
        (b"model: \x00\n", "this is not YAML text"),
        ("[" * 100_000, "nested too deeply"),
        ("#" * (MAX_BYTES + 1), "Is it the right file?"),
    ],
)
def test_a_file_that_is_no_recipe_says_what_it_is(tmp_path, text, said):
    assert said in mistakes(tmp_path, text)


def test_a_path_that_cannot_be_read_says_why(tmp_path):
    with pytest.raises(RecipeError, match="this is a folder"):
        load_recipe(tmp_path)
    with pytest.raises(RecipeError, match="Did you mean 'cpu/h3-mini'"):
        load_recipe("cpu/h3-mni")
    with pytest.raises(RecipeError, match="The packaged one is called 'cpu/h3-mini'"):
        load_recipe("recipes/cpu/h3-mini.yaml")


@pytest.fixture(autouse=True)
def _away_from_the_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_recipe_is_found_by_name_as_by_path():
    by_name = load_recipe("cpu/h3-mini")
    by_path = load_recipe(ROOT / "recipes" / "cpu" / "h3-mini.yaml")
    assert by_name == by_path
    assert by_name.model == "h3-mini"
    assert "cpu/h3-mini" in named_recipes()


def test_a_further_folder_adds_names_but_hides_none(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "h3-mini.yaml").write_text("model: other\n")
    (tmp_path / "mine.yaml").write_text("model: h3-mini\n")
    assert load_recipe("cpu/h3-mini", folders=[tmp_path]).model == "h3-mini"
    assert find_recipe("mine", [tmp_path]) == tmp_path / "mine.yaml"


def test_every_value_says_where_it_comes_from(tmp_path):
    recipe = loaded(tmp_path, "model: h3-mini\nlayout: {ulysses: 1}\n", {"layout.tensor": 2, "offload": {}})
    origin = recipe.provenance
    assert origin["model"] == "recipe"
    assert origin["layout.ulysses"] == "recipe"
    assert origin["layout.tensor"] == "flag"
    assert origin["offload.dit"] == "flag"
    assert origin["layout.ring"] == origin["precision"] == "default"
    assert set(origin) == set(recipe.values())
    assert recipe.layout.tensor == recipe.values()["layout.tensor"] == 2


def test_a_flag_wins_over_the_file(tmp_path):
    recipe = loaded(tmp_path, "model: h3-mini\nprecision: float32\n", {"precision": "bfloat16"})
    assert recipe.precision == "bfloat16"


def test_the_digest_is_that_of_what_runs(tmp_path):
    plain = loaded(tmp_path, "model: h3-mini\n")
    said = loaded(
        tmp_path,
        "model: h3-mini\nweights: builtin\ndescription: x\nmeasured: {when: 2026-11-30}\nreference: {a: 1}\n",
    )
    assert plain.digest == said.digest
    assert len(plain.digest) == 64
    assert plain.digest != loaded(tmp_path, "model: h3-mini\n", {"sampling.steps": 6}).digest
    assert said.measured == {"when": "2026-11-30"}  # a date stays the text it was


def test_a_recipe_cannot_be_changed():
    recipe = load_recipe("cpu/h3-mini")
    with pytest.raises(ValidationError):
        recipe.layout.tensor = 2


def test_packaged_recipes_load_and_obey_the_schema():
    schema, named = recipe_schema(), named_recipes()
    assert "cpu/h3-mini" in named
    for path in named.values():
        load_recipe(path)
        jsonschema.validate(yaml.safe_load(path.read_text()), schema)


def test_measured_figures_name_their_page_and_what_others_say_has_its_source():
    recipes = {name: load_recipe(path) for name, path in named_recipes().items()}
    measured = {name: recipe.measured for name, recipe in recipes.items() if recipe.measured}
    assert measured
    for name, figures in measured.items():
        page = ROOT / str(figures["where"]).rpartition("; ")[2]
        assert page.is_file(), name
        for figure, values in figures.items():
            assert figure == "where" or str(values["seconds"]) in page.read_text(), (name, figure)
    assert all(recipe.reference["source"] for recipe in recipes.values() if recipe.reference)


def test_the_schema_in_the_repository_is_current():
    checked_in = json.loads((ROOT / "recipes" / "schema.json").read_text())
    assert checked_in == recipe_schema(), "write it anew: portable-dit recipes schema > recipes/schema.json"


def test_the_schema_refuses_what_the_reader_refuses():
    for wrong in ({}, {"model": "a", "x": 1}, {"model": "a", "layout": {"tensor": 0}}, {"model": 3}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, recipe_schema())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=4))
def test_reading_yaml_with_lines_gives_what_yaml_gives(data):
    text = yaml.safe_dump(data)
    assume(data and "&" not in text)
    assume(not re.search(r"(?m)[0-9.][eE][-+]?[0-9]|[0-9]:[0-9]", text))  # numbers of YAML 1.2, not of 1.1
    document = parse_document(text)
    assert not document.mistakes
    assert document.data == yaml.safe_load(text)


@given(st.text(max_size=60))
def test_any_text_is_a_recipe_or_a_recipe_error(text):
    document = parse_document(text)
    assert isinstance(document.data, dict)
    assert document.mistakes or document.data or text.strip().startswith("{")


def test_a_set_value_is_read_as_yaml():
    assert parse_value("2") == 2
    assert parse_value("[a, b]") == ["a", "b"]
    assert parse_value("null") is None
    assert parse_value("a:b") == "a:b"
    assert parse_value("") is None
    with pytest.raises(ValueError, match="not YAML"):
        parse_value("[1")
    with pytest.raises(ValueError, match="not YAML"):
        parse_value("1\nmodel: x")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e9", 1e9),
        ("1E-3", 1e-3),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("010", 10),
        ("-7", -7),
        ("0x10", 16),
        ("1:30", "1:30"),
        ("'1e9'", "1e9"),
        ('"010"', "010"),
        ("1e", "1e"),
        ("e9", "e9"),
        ("!!str 010", "010"),
    ],
)
def test_numbers_are_read_as_people_write_them(tmp_path, text, value):
    found = parse_value(text)
    assert (found, type(found)) == (value, type(value))
    found = loaded(tmp_path, f"model: h3-mini\nmeasured: {{a: {text}}}\n").measured["a"]
    assert (found, type(found)) == (value, type(value))


def test_memory_may_be_written_with_an_exponent(tmp_path):
    recipe = loaded(tmp_path, "model: h3-mini\ngraphs: {memory_gib: 1e3}\n", {"device.memory_gib": 2e3})
    assert (recipe.graphs.memory_gib, recipe.device.memory_gib) == (1000.0, 2000.0)
    assert collect_overrides({}, ["graphs.memory_gib=1e3"]) == {"graphs.memory_gib": 1000.0}
    assert "1000000000.0 must be at most 1048576" in mistakes(
        tmp_path, "model: a\ngraphs: {memory_gib: 1e9}\n"
    )
    assert "inf must be a finite number" in mistakes(tmp_path, "model: a\ngraphs: {memory_gib: 1e999}\n")
    assert "measured.b: nan must be a finite" in mistakes(tmp_path, "model: a\nmeasured: {b: {c: .nan}}\n")
    with pytest.raises(RecipeError, match="batch: a number of very many digits must be at most 64"):
        make_recipe({"model": "a", "batch": 10**5000})
    assert "a number of 5,000 digits" in mistakes(tmp_path, f"model: a\nbatch: {'9' * 5000}\n")


SECTIONS = st.sampled_from(list(Recipe.model_fields))
INSIDE = st.dictionaries(
    st.sampled_from(["dit", "keep", "count", "tensor", "steps", "backend"]), VALUES, max_size=3
)


@given(st.dictionaries(SECTIONS, VALUES | INSIDE, max_size=5))
@example({"device": {".": None}})
@example({"device": {"": None, "a.b.c": 1}})
def test_any_data_is_a_recipe_or_a_recipe_error(data):
    with contextlib.suppress(RecipeError):
        assert make_recipe(data).digest


def test_the_recipes_of_the_installed_package_are_found(tmp_path):
    site = tmp_path / "site"
    skip = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(ROOT / "portable_dit", site / "portable_dit", ignore=skip)
    shutil.copytree(ROOT / "recipes", site / "portable_dit" / "recipes")  # as the wheel holds them
    code = "import portable_dit.recipe as r; print(r.__file__); print(r.find_recipe('cpu/h3-mini'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(line.startswith(str(site)) for line in done.stdout.splitlines())
