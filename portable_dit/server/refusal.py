"""Errors as the caller sees them: a status, and a body in the shape that OpenAI's clients read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import HTTPException

from portable_dit.errors import (
    CancelledError,
    DeviceMemoryError,
    DoesNotFitError,
    PortableDitError,
    RankError,
    RequestError,
)
from portable_dit.request import listed

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
CODES = {  # where an error has none of its own
    400: "invalid_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
    414: "too_large",
    431: "too_large",
}
FIELDS = {  # as callers name them
    "steps": "num_inference_steps",
    "images": "n",
    "format": "output_format",
    "references": "image",
}
# What would end alike if it were sent again, at the cost of another drawing. OpenAI's clients send again all
# that ends with 409 or 500 and above, unless they are told not to.
FINAL_CODES = ("cancelled", "failed", "bug", "deadline")
NOT_AGAIN = {"X-Should-Retry": "false"}
ONE_REFERENCE = re.compile(r"reference \d+: ")  # how a problem with one picture begins
CLIENT_LEFT = 499  # nobody reads it; nginx's number, for the log


class ApiError(HTTPException):
    """An answer that is not the one that was hoped for.

    code: a word for programs. param: the field that is wrong, when it is one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        final = NOT_AGAIN if code in FINAL_CODES else {}
        super().__init__(status, message, {**final, **(headers or {})})
        self.code = code
        self.param = param

    def __reduce__(self) -> Any:
        return _rebuilt, (self.status_code, self.detail, self.code, self.param)

    @property
    def body(self) -> dict[str, Any]:
        """{"error": {...}} as the clients know it."""
        return error_body(self.status_code, str(self.detail), code=self.code, param=self.param)


def _rebuilt(status: int, message: str, code: str | None, param: str | None) -> ApiError:
    return ApiError(status, message, code=code, param=param)


def error_body(
    status: int, message: str, *, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    code = code or CODES.get(status)
    kind = TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal_of(error: PortableDitError, names: Mapping[str, str] = FIELDS) -> ApiError:
    """The answer for one of our own errors. names: of a request's fields, where the call has others."""
    if isinstance(error, RequestError) and error.problems:
        return _refused_fields(error.problems, names)
    if isinstance(error, RequestError | DoesNotFitError):
        return ApiError(400, str(error), param="size" if isinstance(error, DoesNotFitError) else None)
    if isinstance(error, CancelledError):
        return ApiError(409, str(error), code="cancelled")
    if isinstance(error, DeviceMemoryError):
        return ApiError(503, str(error), code="out_of_memory", headers={"Retry-After": "5"})
    if isinstance(error, RankError):
        return _lost(f"{error} Try again.")
    return ApiError(500, str(error), code="failed")


def _refused_fields(problems: Sequence[tuple[str, str]], names: Mapping[str, str]) -> ApiError:
    """The answer for fields of a request, called as those who sent them call them."""
    told = []
    for field, text in problems:
        begins = text.startswith((f"{field}=", f"{field}:"))
        told.append(names.get(field, field) + text[len(field) :] if begins else text)
    field, first = problems[0]
    code = "invalid_image" if ONE_REFERENCE.match(first) else None
    return ApiError(400, listed(told), code=code, param=names.get(field, field))


def worker_lost(reason: str) -> ApiError:
    """The answer to those whose worker has ended."""
    return _lost(f"The worker was lost: {reason} Another is being started; try again.")


def _lost(message: str) -> ApiError:
    return ApiError(503, message, code="worker_lost", headers={"Retry-After": "5"})
