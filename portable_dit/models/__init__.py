"""The models by name, and the families that run them. Torch-free: a family's own modules load on demand.

more: families that plugins bring; `catalog.py` finds them. A built-in name is never theirs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from portable_dit.errors import RecipeError, near
from portable_dit.models.h3_image.family import H3Family
from portable_dit.models.spec import Family, ModelSpec

BUILTIN, RANDOM = "builtin", "random"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
FAMILIES: tuple[Family, ...] = (H3Family(),)


def find_family(model: str, more: Sequence[Family] = ()) -> Family:
    """The family that runs the model. Raises RecipeError with the near name."""
    families = (*FAMILIES, *more)
    for family in families:
        if model in family.models:
            return family
    known = [name for family in families for name in family.models]
    raise RecipeError(f"model: {model!r} is not known.{near(model, known)}")


def checkpoint_folder(model: str, weights: str, more: Sequence[Family] = ()) -> Path | None:
    """Where the recipe's weights lie; None for random ones and for a hub id, which has no folder yet.

    Raises RecipeError when the words mean nothing for this model.
    """
    shipped = find_family(model, more).models[model]
    if weights == BUILTIN:
        if shipped is None:
            names = [name for family in (*FAMILIES, *more) for name, own in family.models.items() if own]
            raise RecipeError(
                f"weights: builtin: the package ships weights for {', '.join(names)}, not for {model}. "
                f"Give a folder or a hub id, or model: {names[0]}."
            )
        return shipped
    if weights == RANDOM:
        return None
    folder = Path(weights).expanduser()
    if folder.is_dir():
        return folder
    if HUB_ID.fullmatch(weights):
        return None
    raise RecipeError(
        f"weights: {weights}: there is no such folder. "
        "Say builtin, random, a folder, or a hub id like ORG/NAME."
    )


def read_spec(model: str, weights: str, more: Sequence[Family] = ()) -> ModelSpec:
    """The model's rules and sizes, from the checkpoint's configs where they are here, else as published."""
    family = find_family(model, more)
    return family.read_spec(model, checkpoint_folder(model, weights, more) or family.models[model])
