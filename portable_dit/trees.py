"""What models hand on as tensors, tuples and dataclasses of them, taken as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The value with every tensor in it changed; tuples and dataclasses are looked into."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(mapped(part, change) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: mapped(getattr(value, f.name), change) for f in fields(value)})
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor in the value."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(value, note)
    return found


def shape_of(value: Any) -> str:
    """All of the value but the numbers in its tensors and where they lie, to be compared."""
    return repr(mapped(value, lambda tensor: (tuple(tensor.shape), str(tensor.dtype))))
