"""From a checkpoint's JSON to frozen dataclasses, and back. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from portable_dit.errors import WeightsError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")

# Parts that a checkpoint may do without; every other number of a config must be above zero.
MAY_BE_ZERO = frozenset(
    {
        "pdd_heads",
        "refine_channels",
        "small_pixels",
        "tile_overlap",
        "token_refiner_num_layers",
        "max_references",
        "decoder_num_register_tokens",
        "downsample_stages",
        "condition_time",
    }
)


def read_config(
    cls: type[Config],
    raw: Mapping[str, Any],
    spellings: Mapping[str, str],
    *,
    unpublished: tuple[str, ...],
    where: str,
) -> Config:
    """A config from a JSON object. Keys of other libraries are left alone; wrong values are refused.

    spellings: other names of a field. unpublished: fields whose default leaves a note when it is used. where:
    the file, for messages.
    """
    if not isinstance(raw, Mapping):
        raise WeightsError(f"{where}: must hold a JSON object. Restore the file from the checkpoint.")
    named = {spellings.get(key, key): value for key, value in raw.items()}
    config = cls()
    values: dict[str, Any] = {}
    for f in fields(cls):
        if f.name == "notes" or f.name not in named:
            continue
        default, value = getattr(config, f.name), named[f.name]
        if isinstance(value, list):
            value = tuple(value)
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        optional = default is None and (value is None or isinstance(value, tuple))
        if not optional and type(value) is not type(default):
            kind = "list" if default is None else type(default).__name__
            raise WeightsError(
                f"{where}: {f.name} = {value!r} must be a {kind}, such as {_short(default)}. "
                "Restore the file from the checkpoint."
            )
        _require_sound(value, f.name, where)
        values[f.name] = value
    notes = tuple(
        f"{where} does not give {name}; using {_short(getattr(config, name))}, inferred from the family."
        for name in unpublished
        if name not in named
    )
    return replace(config, **values, notes=notes)


def _require_sound(value: Any, name: str, where: str) -> None:
    """Numbers are finite, and above zero where a model cannot be built without."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not math.isfinite(value) or value < 0 or (value == 0 and name not in MAY_BE_ZERO):
        least = "at least 0" if name in MAY_BE_ZERO else "above 0"
        raise WeightsError(
            f"{where}: {name} = {value!r} must be {least}. Restore the file from the checkpoint."
        )


def _short(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > 3:
        return f"{len(value)} values of the H3 video VAE"
    return str(value)


def plain(config: Any) -> dict[str, Any]:
    """The config as JSON-able values, without notes, for a file written from the modules' own state dict."""
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(config).items() if k != "notes"}
    return {**values, "qkv_rows": "stacked"} if "qkv_rows" in values else values


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    if not path.is_file():
        if not required:
            return {}
        raise WeightsError(
            f"{path}: missing. A checkpoint of this family needs it; is the download complete?"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(
            f"{path}: not readable as JSON ({error}). Restore it from the checkpoint."
        ) from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: must hold a JSON object. Restore it from the checkpoint.")
    return value
