"""Recipes and models by name: those of this package, then those that plugins bring.

The one place to look names up in, for the engine and the command line alike. Plugins are asked only for a
name that is not ours, since finding them takes a while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from portable_dit import models, recipe
from portable_dit.models.spec import Family, ModelSpec
from portable_dit.recipe import Recipe


def load_recipe(ref: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe at a path, or by name ("cpu/h3-mini"), with dotted overrides.

    Raises RecipeError that lists every mistake in the file and in the overrides.
    """
    ours = Path(ref).exists() or str(ref) in recipe.named_recipes()
    return recipe.load_recipe(ref, overrides, folders=() if ours else _plugin_folders())


def named_recipes() -> dict[str, Path]:
    """Every recipe that is found by name, with its file."""
    return recipe.named_recipes(_plugin_folders())


def find_family(model: str) -> Family:
    """The family that runs the model. Raises RecipeError with the near name."""
    return models.find_family(model, _more(model))


def checkpoint_folder(wish: Recipe) -> Path | None:
    """Where the recipe's weights lie; None for random ones and for a hub id."""
    return models.checkpoint_folder(wish.model, wish.weights, _more(wish.model))


def read_spec(wish: Recipe) -> ModelSpec:
    """The rules and sizes of the recipe's model. Raises RecipeError when model or weights mean nothing."""
    return models.read_spec(wish.model, wish.weights, _more(wish.model))


def _more(model: str) -> Sequence[Family]:
    """The families of plugins, if the model is not ours."""
    if any(model in family.models for family in models.FAMILIES):
        return ()
    from portable_dit.plugins import load_plugins

    return load_plugins().families


def _plugin_folders() -> Sequence[Path]:
    from portable_dit.plugins import load_plugins

    return load_plugins().recipe_folders
