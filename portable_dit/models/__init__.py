"""The models by name, and the families that run them. Torch-free: a family's own modules load on demand.

more: families that plugins bring; `catalog.py` finds them. A built-in name is never theirs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from portable_dit.errors import RecipeError, near
from portable_dit.models.h3_image.family import H3Family
from portable_dit.models.hunyuan_image_3.family import HunyuanFamily
from portable_dit.models.spec import Family, ModelSpec
from portable_dit.paths import expanded, kind_of

BUILTIN, RANDOM = "builtin", "random"
# ORG/NAME, with a revision and a folder or file inside when they are said: ORG/NAME@REVISION:FOLDER
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?(:[\w./-]+)?")
FAMILIES: tuple[Family, ...] = (H3Family(), HunyuanFamily())


def find_family(model: str, more: Sequence[Family] = ()) -> Family:
    """The family that runs the model. Raises RecipeError with the near name."""
    families = (*FAMILIES, *more)
    for family in families:
        if model in family.models:
            return family
    known = [name for family in families for name in family.models]
    raise RecipeError(f"model: {model!r} is not known.{near(model, known)}")


def checkpoint_folder(model: str, weights: str, more: Sequence[Family] = ()) -> Path | None:
    """The folder or file of the recipe's weights; None for random ones and for a hub id.

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
    return local_weights("weights", weights)


def local_weights(key: str, weights: str) -> Path | None:
    """The folder or .safetensors file that the words name, None for a hub id. Raises RecipeError."""
    place = expanded(weights)
    kind = kind_of(place)
    if kind == "folder" or (kind == "file" and place.suffix == ".safetensors"):
        return place
    if kind == "file":
        raise RecipeError(
            f"{key}: {weights}: not a .safetensors file, and no other format is read, since others can run "
            "code. Convert it with the safetensors library."
        )
    if kind == "hidden":
        raise RecipeError(
            f"{key}: {weights}: may not be looked at (Permission denied). Change the mode of the folders "
            "above it, or copy the checkpoint."
        )
    if HUB_ID.fullmatch(weights):
        return None
    named = "builtin, random, " if key == "weights" else ""
    raise RecipeError(
        f"{key}: {weights}: there is no such folder or file. "
        f"Say {named}a folder, a .safetensors file, or a hub id like ORG/NAME."
    )


def read_spec(
    model: str,
    checkpoint: Path | str | None,
    more: Sequence[Family] = (),
    *,
    dialect: str = "auto",
    components: Mapping[str, Path] | None = None,
) -> ModelSpec:
    """The model's rules and sizes, from the checkpoint's configs where they are here, else as published.

    checkpoint: its folder or file, or the words of a recipe for them.
    """
    family = find_family(model, more)
    if isinstance(checkpoint, str):
        checkpoint = checkpoint_folder(model, checkpoint, more)
    return family.read_spec(model, checkpoint or family.models[model], dialect=dialect, components=components)
