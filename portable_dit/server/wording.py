"""What is wrong with a body, in one sentence with the field's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from portable_dit.errors import near
from portable_dit.server.refusal import ApiError

MOST_TOLD = 100  # characters of a value or name that came from outside


def first_problem(errors: Sequence[Mapping[str, Any]], known: tuple[str, ...] = ()) -> ApiError:
    """ApiError 400 for pydantic's errors: the first in full, the others counted."""
    error = errors[0]
    place = ".".join(str(part) for part in error["loc"] if part not in ("body", "query", "path"))[:MOST_TOLD]
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = f"not a field of this call.{near(place, known) if known else ''}"
    elif error["type"] == "missing":
        message = "missing"
    elif error["type"] == "json_invalid":
        place, message = "body", f"not JSON ({error.get('ctx', {}).get('error', 'malformed')})"
    more = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
    text = message if not place else f"{place}: {message}"
    return ApiError(400, f"{text}{more}", code="invalid_request", param=place or None)
