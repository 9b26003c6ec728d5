"""Recipes and models by name: those of this package, then those that plugins bring.

The one place to look names up in, for the engine and the command line alike. Plugins are asked only for a
name that is not ours, since finding them takes a while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from portable_dit import models, recipe
from portable_dit.errors import WeightsError
from portable_dit.models.spec import Family, ModelSpec
from portable_dit.paths import kind_of, told_what_is_hidden
from portable_dit.recipe import Recipe


def load_recipe(ref: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe at a path, or by name ("cpu/h3-mini"), with dotted overrides.

    Raises RecipeError that lists every mistake in the file and in the overrides.
    """
    return recipe.load_recipe(ref, overrides, folders=_folders_beside(ref))


def find_recipe(ref: str | Path) -> Path:
    """The file of the recipe at a path or by name. Raises RecipeError."""
    return recipe.find_recipe(ref, _folders_beside(ref))


def named_recipes() -> dict[str, Path]:
    """Every recipe that is found by name, with its file."""
    return recipe.named_recipes(_plugin_folders())


def find_family(model: str) -> Family:
    """The family that runs the model. Raises RecipeError with the near name."""
    return models.find_family(model, _more(model))


def checkpoint_folder(wish: Recipe) -> Path | None:
    """Where the recipe's weights lie; None for random ones and for a hub id that was not fetched yet."""
    here = models.checkpoint_folder(wish.model, wish.weights, _more(wish.model))
    if here is None and wish.weights != models.RANDOM:
        from portable_dit.hub import cached

        return cached(wish.weights)
    return here


def is_remote(wish: Recipe) -> bool:
    """Whether something that the recipe names lies on a hub and is not on this machine yet."""
    if any(place is None for place, _ in adapter_places(wish)):
        return True
    if checkpoint_folder(wish) is None:
        return wish.weights != models.RANDOM
    return not _component_words(wish).keys() <= component_places(wish).keys()


def component_places(wish: Recipe) -> dict[str, Path]:
    """Where components lie that are not among the recipe's weights, as far as they are on this machine."""
    places = {}
    for name, words in _component_words(wish).items():
        place = _here(f"components.{name}", words)
        if place is not None:
            places[name] = place
    local = models.checkpoint_folder(wish.model, wish.weights, _more(wish.model))
    folder = checkpoint_folder(wish)
    if local is None and folder is not None and folder.is_dir():
        from portable_dit.hub import elsewhere

        found = elsewhere(folder, find_family(wish.model), dialect=wish.checkpoint_dialect)
        places = {**found, **places}
    return places


def adapter_places(wish: Recipe) -> list[tuple[Path | None, float]]:
    """Where each LoRA adapter of the recipe lies, None for one that must be fetched, and its scale."""
    from portable_dit.lora import split_scale

    return [(_here("lora", words), scale) for words, scale in map(split_scale, wish.lora)]


def _here(key: str, words: str) -> Path | None:
    """Where what a key names lies on this machine; None for what is on a hub and must be fetched."""
    local = models.local_weights(key, words)
    if local is not None:
        return local
    from portable_dit.hub import cached

    return cached(words)


def fetch_spec(wish: Recipe) -> ModelSpec | None:
    """The rules and sizes of a checkpoint on a hub, for which only its small files are downloaded.

    None when they do not say: single files have no configs beside them.
    """
    folder, places = fetch_weights(wish, configs_only=True)
    if folder is None or not any(folder.rglob("config.json")):
        return None
    more, dialect = _more(wish.model), wish.checkpoint_dialect
    try:
        return models.read_spec(wish.model, folder, more, dialect=dialect, components=places)
    except WeightsError:
        return None


def fetch_weights(wish: Recipe, *, configs_only: bool = False) -> tuple[Path | None, dict[str, Path]]:
    """Downloads what the recipe names on a hub and is not here yet; does nothing for folders and files.

    Gives where the checkpoint lies now, and the components that lie elsewhere. Raises WeightsError that says
    why a download is not possible.
    """
    family = find_family(wish.model)
    local = models.checkpoint_folder(wish.model, wish.weights, _more(wish.model))
    elsewhere = _component_words(wish)
    places: dict[str, Path] = {}
    if local is None and wish.weights != models.RANDOM:
        from portable_dit.hub import fetch_checkpoint

        local, places = fetch_checkpoint(
            wish.weights,
            family,
            dialect=wish.checkpoint_dialect,
            without=tuple(elsewhere),
            configs_only=configs_only,
        )
    for name, words in elsewhere.items():
        place = models.local_weights(f"components.{name}", words)
        if place is None:
            from portable_dit.hub import fetch_component

            place = fetch_component(words, configs_only=configs_only)
        places[name] = place
    if not configs_only:
        _fetch_adapters(wish)
    return local, places


def _fetch_adapters(wish: Recipe) -> None:
    """Downloads the recipe's LoRA adapters that are on a hub and not here yet."""
    from portable_dit.lora import split_scale

    for words, _ in map(split_scale, wish.lora):
        if _here("lora", words) is None:
            from portable_dit.hub import fetch_adapter

            fetch_adapter(words)


@told_what_is_hidden()
def read_spec(wish: Recipe) -> ModelSpec:
    """The rules and sizes of the recipe's model.

    Raises RecipeError when model or weights mean nothing, WeightsError for an adapter that is none.
    """
    from portable_dit.lora import read_adapter

    for place, scale in adapter_places(wish):
        if place is not None:
            read_adapter(place, scale)
    return models.read_spec(
        wish.model,
        checkpoint_folder(wish),
        _more(wish.model),
        dialect=wish.checkpoint_dialect,
        components=component_places(wish),
    )


def _component_words(wish: Recipe) -> dict[str, str]:
    given = wish.components
    words = {"dit": given.dit, "vae": given.vae, "text_encoder": given.text_encoder}
    return {name: value for name, value in words.items() if value is not None}


def _more(model: str) -> Sequence[Family]:
    """The families of plugins, if the model is not ours."""
    if any(model in family.models for family in models.FAMILIES):
        return ()
    from portable_dit.plugins import load_additions

    return load_additions().families


def _folders_beside(ref: str | Path) -> Sequence[Path]:
    """The folders of plugins, unless the recipe is ours or a file."""
    ours = str(ref) in recipe.named_recipes() or kind_of(str(ref)) != "missing"
    return () if ours else _plugin_folders()


def _plugin_folders() -> Sequence[Path]:
    from portable_dit.plugins import load_additions

    return load_additions().recipe_folders
