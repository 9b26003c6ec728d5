"""The block `_minimax_h3` of model_index.json: the schedule, and heads in a file of their own. Torch-free.

Such a file holds one output head for each step, fused from the heads of a finer grid, under the names
video_out.weight [steps, row, C] and video_out.bias [steps, row]; pdd_config.json beside it says which
schedule they are for. Heads belong to their noise levels, so any other schedule is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portable_dit.errors import WeightsError
from portable_dit.models.config_json import inner_object, read_config, read_json

BLOCK = "_minimax_h3"
HEADS_CONFIG = "pdd_config.json"


@dataclass(frozen=True)
class PrivateBlock:
    """schedule: what it says of the scheduler's config. heads: the file of the heads, if there is one."""

    schedule: Mapping[str, Any]
    heads: Path | None = None


@dataclass(frozen=True)
class HeadsSchedule:
    """pdd_config.json: the schedule of the heads. sigma_max: where it begins, 1 = at noise alone."""

    num_inference_steps: int = 6
    video_shift: float = 12.0
    sigma_max: float = 1.0
    notes: tuple[str, ...] = ()


def read_private_block(root: Path, index: Mapping[str, Any], scheduler: Mapping[str, Any]) -> PrivateBlock:
    """The block of a checkpoint in the folder `root`, whose model_index.json is `index`.

    scheduler: scheduler_config.json, which counts more. Raises WeightsError when the block is malformed, when
    its file of heads is missing, or when that is for another schedule.
    """
    block = inner_object(index, BLOCK, "model_index.json")
    scales = inner_object(block, "sigma_shift_scales", f"model_index.json, block {BLOCK}")
    schedule = {"shift": scales["video"]} if "video" in scales else {}
    if block.get("base_schedule") is not None:
        schedule["base_schedule"] = block["base_schedule"]
    name = block.get("pdd_fused_heads")
    if name is None:
        return PrivateBlock(schedule)
    heads = root / _inside(name)
    if not heads.is_file():
        raise WeightsError(f"{heads}: missing, and model_index.json names it. Is the download complete?")
    return PrivateBlock(_schedule_of_heads(heads, {**schedule, **scheduler}) | schedule, heads)


def _schedule_of_heads(heads: Path, told: Mapping[str, Any]) -> dict[str, Any]:
    """The schedule beside a file of heads, which must be the one that was told, as far as one was."""
    place = heads.parent / HEADS_CONFIG
    raw = read_json(place)
    lacking = [key for key in ("num_inference_steps", "video_shift") if key not in raw]
    if lacking:
        raise WeightsError(f"{place}: {' and '.join(lacking)} missing. Restore the file from the checkpoint.")
    made_for = read_config(HeadsSchedule, raw, {}, unpublished=(), where=str(place))
    if made_for.sigma_max != 1.0:
        raise WeightsError(
            f"{place}: sigma_max = {made_for.sigma_max}: heads of a schedule that does not begin at noise "
            "alone are not read. Use a checkpoint with sigma_max 1."
        )
    schedule = {"num_inference_steps": made_for.num_inference_steps, "shift": made_for.video_shift}
    for key, value in schedule.items():
        if told.get(key, value) != value:
            raise WeightsError(
                f"{place}: the heads are for {key} {value}, and the checkpoint's schedule has {told[key]}. "
                "Heads belong to their noise levels: use files of one and the same checkpoint."
            )
    return schedule


def _inside(name: Any) -> Path:
    path = Path(name) if isinstance(name, str) else Path()
    if not path.name or path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors":
        raise WeightsError(
            f"model_index.json: {BLOCK}.pdd_fused_heads = {name!r}: must be the path of a .safetensors file "
            "inside the checkpoint. Restore the file from the checkpoint."
        )
    return path
