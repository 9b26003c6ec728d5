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

MOST = 2**31  # no size, count or id of a model is larger
MOST_LAYERS = 1000
LAYERS = frozenset(
    {
        "num_layers",
        "token_refiner_num_layers",
        "decoder_num_layers",
        "depth",
        "layers_per_block",
        "downsample_stages",
        "num_inference_steps",
        "pdd_heads",
    }
)
PLACES = frozenset({"deepstack"})  # lists of layers, counted from 0, and perhaps of none
OF_ONE_LENGTH = frozenset({"patch_size", "mrope_section", "image_mean", "image_std"})


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
        if isinstance(default, float) and type(value) is int and value.bit_length() < 64:
            value = float(value)
        optional = default is None and (value is None or isinstance(value, tuple))
        if not optional and type(value) is not type(default):
            kind = "list" if default is None else type(default).__name__
            raise _wrong(where, f.name, value, f"must be a {kind}, such as {_short(default)}")
        if isinstance(value, tuple):
            value = _sound_list(value, default, f.name, where)
        else:
            _require_sound(value, f.name, where)
        values[f.name] = value
    notes = tuple(
        f"{where} does not give {name}; using {_short(getattr(config, name))}, inferred from the family."
        for name in unpublished
        if name not in named
    )
    return replace(config, **values, notes=notes)


def inner_object(raw: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """The JSON object under a key, {} when there is none. Raises WeightsError for anything else."""
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(where, key, value, "must be a JSON object")
    return value


def whole_number(raw: Mapping[str, Any], key: str, where: str) -> int | None:
    """A whole number above zero that is no field of a config, None when it is not there."""
    value = raw.get(key)
    if value is None:
        return None
    if type(value) is not int:
        raise _wrong(where, key, value, "must be an int")
    _require_sound(value, key, where)
    return value


def _require_sound(value: Any, name: str, where: str) -> None:
    """Numbers are finite, no larger than a model's, and above zero where one cannot be built without."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if isinstance(value, int) and value > (most := MOST_LAYERS if name in LAYERS else MOST):
        raise _wrong(where, name, value, f"must be at most {most}")
    if not math.isfinite(value) or value < 0 or (value == 0 and name not in MAY_BE_ZERO):
        least = "at least 0" if name in MAY_BE_ZERO else "above 0"
        raise _wrong(where, name, value, f"must be {least}")


def _sound_list(value: tuple[Any, ...], default: tuple[Any, ...] | None, name: str, where: str) -> Any:
    """The list with values of one kind, that of the default's; whole numbers pass for others.

    Sizes in a list are above zero; other numbers of a list are only finite.
    """
    example = 1.0 if default is None else default[0]
    if isinstance(example, float):
        value = tuple(float(v) if type(v) is int and abs(v) <= MOST else v for v in value)
    if any(type(v) is not type(example) for v in value):
        raise _wrong(where, name, value, f"must hold values like {example}")
    if any(v > MOST or v < (name not in PLACES) for v in value if isinstance(v, int)):
        raise _wrong(where, name, value, f"must hold numbers up to {MOST}, and above 0 where they are sizes")
    if not all(math.isfinite(v) for v in value):
        raise _wrong(where, name, value, "must hold finite numbers")
    if name in OF_ONE_LENGTH and default is not None and len(value) != len(default):
        raise _wrong(where, name, value, f"must hold {len(default)} values")
    if not value and name not in PLACES:
        raise _wrong(where, name, value, "must not be empty")
    return value


def _wrong(where: str, name: str, value: Any, rule: str) -> WeightsError:
    shown = f"{value!r:.80}"
    return WeightsError(f"{where}: {name} = {shown} {rule}. Restore the file from the checkpoint.")


def _short(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > 3:
        return f"{len(value)} values of the H3 video VAE"
    return str(value)


def plain(config: Any) -> dict[str, Any]:
    """The config as JSON-able values, without notes, for a file written from the modules' own state dict."""
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(config).items() if k != "notes"}
    return {**values, "qkv_rows": "stacked"} if "qkv_rows" in values else values


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """The JSON object in a file, {} when it is not there and need not be. Raises WeightsError."""
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
