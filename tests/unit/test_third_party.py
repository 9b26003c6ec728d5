"""What one more package adds is found by name, by the engine and the command line alike."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from portable_dit import Engine, load_recipe
from portable_dit.catalog import named_recipes
from portable_dit.errors import RecipeError
from portable_dit.plugins import load_additions, load_plugins

PLUGIN = """
from pathlib import Path

from portable_dit.backend import AttentionKernel
from portable_dit.hooks import hookimpl
from portable_dit.models.h3_image.family import H3Family

class Loud(AttentionKernel):
    id = "loud"

    def run(self, q, k, v, mask, *, scale):
        return 1.5 * super().run(q, k, v, mask, scale=scale)

class OurFamily(H3Family):
    name = "ours"
    models = {{"our-mini": Path({checkpoint!r}), "our-large": None}}

@hookimpl
def portable_dit_attention_kernels(backend):
    return [Loud()] if backend == "cpu" else []

@hookimpl
def portable_dit_model_families():
    return [OurFamily()]

@hookimpl
def portable_dit_recipe_folders():
    return [Path({recipes!r})]
"""
RECIPE = "model: our-mini\ndevice: {backend: cpu}\nprecision: float32\n"


@pytest.fixture
def package(shelf, tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = tmp_path / "recipes" / "cpu"
    folder.mkdir(parents=True)
    (folder / "ours.yaml").write_text(RECIPE)
    (folder / "loud.yaml").write_text(f"{RECIPE}attention: loud\n")
    shelf.install("extra", PLUGIN.format(checkpoint=str(tiny_checkpoint), recipes=str(folder.parent)))


@pytest.mark.usefixtures("package")
def test_a_plugins_recipe_draws_its_own_model_with_its_own_kernel(tiny_recipe):
    pictures = []
    for recipe in (tiny_recipe, "cpu/ours", "cpu/loud"):
        with Engine.load(recipe) as engine:
            pictures.append(engine.generate("a red apple"))
    ours, loud = pictures[1:]
    assert ours.images[0].record["model"] == "our-mini"
    assert np.array_equal(ours.images[0].pixels, pictures[0].images[0].pixels)
    assert loud.kernels["dit"]["attention"] == "loud"
    assert not np.array_equal(loud.images[0].pixels, ours.images[0].pixels)


@pytest.mark.usefixtures("package")
def test_the_command_line_finds_what_the_engine_finds(cli):
    assert load_recipe("cpu/ours").model == "our-mini"
    listed = {entry["name"] for entry in json.loads(cli("recipes", "list", "--json").stdout)}
    assert listed == set(named_recipes())
    assert {"cpu/h3-mini", "cpu/ours", "cpu/loud"} <= listed
    assert cli("recipes", "validate", "cpu/ours", "cpu/loud").exit_code == 0
    plan = cli("plan", "--recipe", "cpu/loud", "--json")
    assert plan.exit_code == 0, plan.stderr
    assert json.loads(plan.stdout)["kernels"]["dit"]["attention"] == "loud"


@pytest.mark.usefixtures("package")
def test_an_unknown_model_names_those_of_plugins_too():
    recipe = load_recipe("cpu/ours", {"model": "our-mni"})
    with pytest.raises(RecipeError, match=r"Did you mean 'our-mini'.*h3-mini.*our-large"):
        Engine.load(recipe)
    with pytest.raises(RecipeError, match=r"ships weights for h3-mini, our-mini, not for our-large"):
        Engine.load("cpu/ours", {"model": "our-large"})


def test_without_the_package_its_names_are_unknown():
    with pytest.raises(RecipeError, match="neither a file nor a recipe's name"):
        Engine.load("cpu/ours")


def test_two_packages_cannot_bring_one_model_and_a_family_must_be_one(shelf, tiny_checkpoint):
    source = PLUGIN.format(checkpoint=str(tiny_checkpoint), recipes="/nowhere")
    shelf.install("first", source)
    shelf.install("second", source)
    shelf.install(
        "third",
        "from portable_dit.hooks import hookimpl\n"
        "@hookimpl\ndef portable_dit_model_families(): return [('tiny', 'tiny_package')]\n",
    )
    plugins = load_plugins()
    reasons = {status.name: status.reason for status in plugins.status}
    assert reasons["first"] is None
    assert reasons["second"] == "model 'our-mini' already belongs to family ours"
    assert reasons["third"] == "tuple is not a portable_dit.models.spec.Family"
    assert [family.name for family in load_additions().families] == ["ours"]
