"""From a checkpoint's JSON to frozen dataclasses, and back. Torch-free.

Whatever a file says, reading it ends soon: in a config that a model can be counted from, or in one message
with the file, the key and the rule. The names below are those of all families' configs.
"""

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
MOST_NUMBER = 10**12  # nor is any other number
MOST_LAYERS = 1000  # of what is made or gone through one by one
LAYERS = frozenset(
    {
        "num_layers",
        "num_hidden_layers",
        "token_refiner_num_layers",
        "decoder_num_layers",
        "depth",
        "layers_per_block",
        "downsample_stages",
        "block_out_channels",
        "num_experts",
        "num_inference_steps",
        "diff_infer_steps",
        "pdd_heads",
    }
)
# Beyond this shift, float32 noise levels of neighbouring steps become one.
MOST_OF: Mapping[str, int] = {
    **dict.fromkeys(LAYERS, MOST_LAYERS),
    **dict.fromkeys(("shift", "video_shift", "flow_shift"), 1000),
    **dict.fromkeys(("norm_eps", "qk_norm_eps", "final_norm_eps", "decoder_norm_eps", "rms_norm_eps"), 1),
    "diff_guidance_scale": 100,
    "image_base_size": 2**14,
    "reference_pixels": 2**26,
    "condition_time": 1,
}
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
PLACES = frozenset({"deepstack"})  # lists of layers, counted from 0, and perhaps of none
ABOVE_ZERO = frozenset({"latents_std", "image_std"})  # lists of numbers that are divided by
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
    config = cls()
    names = {f.name for f in fields(cls)} - {"notes"}
    values: dict[str, Any] = {}
    for key, stored in raw.items():
        name = spellings.get(key, key)
        if name not in names:
            continue
        default = getattr(config, name)
        value = _converted(stored, default)
        rule = _broken_rule(value, default, name)
        if rule is None and values.get(name, value) != value:
            rule = f"must be what the file says elsewhere, {values[name]!r:.80}"
        if rule is not None:
            raise _wrong(where, key, stored, rule)
        values[name] = value
    notes = tuple(
        f"{where} does not give {name}; using {_short(getattr(config, name))}, inferred from the family."
        for name in unpublished
        if name not in values
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
    rule = _broken_rule(value, 1, key)
    if rule is not None:
        raise _wrong(where, key, value, rule)
    return int(value)


def _converted(value: Any, default: Any) -> Any:
    """JSON's lists as tuples, and whole numbers as floats where the default is one.

    Lists in lists are left alone: no field has them, and they may be nested without end.
    """
    if isinstance(value, list) and (default is None or isinstance(default, tuple)):
        example = 1.0 if default is None else default[0]
        return tuple(item if isinstance(item, list) else _converted(item, example) for item in value)
    if isinstance(default, float) and type(value) is int and value.bit_length() < 64:
        return float(value)
    return value


def _broken_rule(value: Any, default: Any, name: str) -> str | None:
    """Which rule a value of a field breaks: that of its kind, or of its size."""
    if default is None and value is None:
        return None
    if default is None or isinstance(default, tuple):
        if not isinstance(value, tuple):
            return f"must be a list, such as {_short(default)}" if default else "must be a list of numbers"
        return _broken_list_rule(value, default, name)
    if type(value) is not type(default):
        return f"must be {KINDS[type(default)]}, such as {_short(default)}"
    if isinstance(value, bool | str):
        return None
    most = MOST_OF.get(name, MOST if isinstance(value, int) else MOST_NUMBER)
    if value > most:
        return f"must be at most {most}"
    if not math.isfinite(value) or value < 0 or (value == 0 and name not in MAY_BE_ZERO):
        return "must be at least 0" if name in MAY_BE_ZERO else "must be above 0"
    return None


def _broken_list_rule(value: tuple[Any, ...], default: tuple[Any, ...] | None, name: str) -> str | None:
    """As `_broken_rule`. Sizes in a list are above zero; other numbers of a list may be below."""
    example = 1.0 if default is None else default[0]
    if any(type(v) is not type(example) for v in value):
        return f"must hold values like {example}"
    if any(v > MOST or v < (name not in PLACES) for v in value if isinstance(v, int)):
        return f"must hold numbers up to {MOST}, and above 0 where they are sizes"
    if not all(abs(v) <= MOST_NUMBER for v in value):  # NaN is not, either
        return f"must hold numbers from {-MOST_NUMBER} to {MOST_NUMBER}"
    if name in ABOVE_ZERO and any(v <= 0 for v in value):
        return "must hold numbers above 0"
    if name in OF_ONE_LENGTH and default is not None and len(value) != len(default):
        return f"must hold {len(default)} values"
    if name in LAYERS and len(value) > MOST_LAYERS:
        return f"must hold at most {MOST_LAYERS} values"
    if not value and name not in PLACES:
        return "must not be empty"
    return None


def _wrong(where: str, name: str, value: Any, rule: str) -> WeightsError:
    shown = f"{value!r:.80}"
    return WeightsError(f"{where}: {name} = {shown} {rule}. Restore the file from the checkpoint.")


def _short(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > 3:
        return f"{len(value)} values ({value[0]:g}, ...)"
    return str(list(value)) if isinstance(value, tuple) else str(value)


def plain(config: Any) -> dict[str, Any]:
    """The config as JSON-able values, without notes."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(config).items() if k != "notes"}


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """The JSON object in a file, {} when it is not there and need not be. Raises WeightsError."""
    if not path.is_file():
        if not required:
            return {}
        raise WeightsError(f"{path}: missing. A checkpoint of this model needs it; is the download complete?")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except PermissionError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(
            f"{path}: not readable as JSON ({error}). Restore it from the checkpoint."
        ) from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: must hold a JSON object. Restore it from the checkpoint.")
    return value
