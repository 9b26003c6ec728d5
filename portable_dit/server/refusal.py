"""Errors as the caller sees them: a status, and a body in the shape that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException

from portable_dit.errors import (
    CancelledError,
    DeviceMemoryError,
    PortableDitError,
    RankError,
    UserError,
)

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
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
        super().__init__(status, message, dict(headers or {}))
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
    kind = TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refusal_of(error: PortableDitError) -> ApiError:
    """The answer for one of our own errors."""
    if isinstance(error, UserError):
        return ApiError(400, str(error), code="invalid_request")
    if isinstance(error, CancelledError):
        return ApiError(409, str(error), code="cancelled")
    if isinstance(error, DeviceMemoryError):
        return ApiError(503, str(error), code="out_of_memory", headers={"Retry-After": "5"})
    if isinstance(error, RankError):
        return worker_lost(str(error))
    return ApiError(500, str(error), code="failed")


def worker_lost(reason: str) -> ApiError:
    return ApiError(
        503,
        f"The worker was lost: {reason} Another is being started; try again.",
        code="worker_lost",
        headers={"Retry-After": "5"},
    )
