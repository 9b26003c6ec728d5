"""The gate: what every request passes before a route sees it, as plain ASGI.

Request ids, who may come in, how large a body may be and how slowly it may arrive, and headers that every
answer carries.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from portable_dit.server.metrics import Metrics
from portable_dit.server.refusal import CLIENT_LEFT, ApiError
from portable_dit.server.settings import Limits, Settings

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Answered to everybody: probes, the page, and pictures, whose addresses cannot be guessed.
OPEN_PATHS = ("/health", "/ready", "/", "/docs")
OPEN_FOLDERS = ("/page/", "/v1/pictures/")
QUIET_PATHS = ("/health", "/ready", "/metrics")  # asked by machines every few seconds
# Empty lists and objects take 30 times their bytes in Python: a body of commas and brackets is one of values.
MAX_JSON_VALUES = 20_000
LINGER_SECONDS = 2.0
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
ANSWER_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class Gate:
    """ASGI middleware."""

    app: ASGIApp
    settings: Settings
    metrics: Metrics
    log: Callable[[str], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        start = time.perf_counter()
        visit = _Visit(self.settings.limits, headers, receive, send)
        state = scope.setdefault("state", {})
        state["id"] = visit.id
        # Whoever asks for the head alone gets that of a GET: the server that sends it leaves the body out.
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        failed = True
        try:
            visit.check_length()
            self._check_caller(headers)
            state["client"] = self._client(scope, headers)
            await self.app(asked, visit.receive, visit.send)
            failed = False
        except ApiError as error:  # raised before a route was reached
            await _send_error(error, visit.send)
        finally:
            if failed and not visit.status:
                visit.status = 500  # as the application answers a bug, around this
            path = getattr(asked.get("route"), "path", "other")
            self.metrics.http_requests.labels(path, visit.status or "none").inc()
            if path not in QUIET_PATHS:
                seconds = time.perf_counter() - start
                self.log(f"{visit.id} {scope['method']} {path} {visit.status or 'left'} {seconds:.3f} s")

    def _check_caller(self, headers: Headers) -> None:
        """Refuses pages of other sites, which a browser would let call us, and names that are not ours."""
        host = headers.get("host", "")
        if self.settings.is_loopback and not self._is_own_name(host):
            raise ApiError(
                403,
                f"host {host[:100]!r}: not a name of this server. Add it with --allowed-host if it is.",
                code="wrong_host",
            )
        origin = headers.get("origin")
        if origin and origin not in self.settings.cors_origins and _netloc(origin) != host.lower():
            raise ApiError(
                403, "Pages of other sites may not call this server. See --cors-origin.", code="wrong_origin"
            )

    def _is_own_name(self, host: str) -> bool:
        name = host.lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        if name in ("localhost", self.settings.host, *self.settings.allowed_hosts):
            return True
        try:
            ipaddress.ip_address(name)  # cannot be made to point here by somebody's name server
        except ValueError:
            return False
        return True

    def _client(self, scope: Scope, headers: Headers) -> str:
        """Who asks: the digest of an API key, or the peer's address where there are none."""
        keys, path, peer = self.settings.keys, scope["path"], scope.get("client")
        if not keys:
            return f"peer {peer[0]}" if peer else "local"
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDERS):
            return "open"
        kind, _, given = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        known = [hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest()) for key in keys]
        if kind.lower() != "bearer" or not any(known):
            raise ApiError(
                401,
                "No valid API key. Send one as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return f"key {digest.hex()[:16]}"


class _Visit:
    """One request on its way in and out."""

    def __init__(self, limits: Limits, headers: Headers, receive: Receive, send: Send) -> None:
        given = headers.get("x-request-id", "")
        self.id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        self.status = 0
        self._limits = limits
        self._length = headers.get("content-length", "0")
        self._has_body = self._length != "0" or "transfer-encoding" in headers
        self._is_json = "json" in headers.get("content-type", "")
        self._receive, self._send = receive, send
        self._arrived = self._values = 0
        self._whole = False
        self._refused = False
        self._deadline = time.monotonic() + limits.body_seconds

    def check_length(self) -> None:
        """Refuses a body that says that it is too large before any of it is read."""
        length = self._length
        if not length.isdecimal() or len(length) > 18 or int(length) > self._limits.body_bytes:
            raise self._refusal(413, f"The body {self._size_rule}", "too_large")

    async def receive(self) -> Message:
        """The next piece of the body, refused when it is too much or too slow."""
        if self._whole:  # what comes now is that the caller leaves
            return await self._receive()
        try:
            left = max(self._deadline - time.monotonic(), 0.001)
            message = await asyncio.wait_for(self._receive(), left)
        except asyncio.TimeoutError as error:
            seconds = self._limits.body_seconds
            raise self._refusal(408, f"The body was not here after {seconds:g} s.", "too_slow") from error
        if message["type"] == "http.disconnect" and self._has_body:
            raise ApiError(CLIENT_LEFT, "The caller has left in the middle of the body.")
        if message["type"] == "http.request":
            piece = message.get("body", b"")
            self._whole = not message.get("more_body", False)
            self._arrived += len(piece)
            if self._arrived > self._limits.body_bytes:
                raise self._refusal(413, f"The body {self._size_rule}", "too_large")
            if self._is_json:
                self._values += sum(map(piece.count, (b",", b"[", b"{")))
                if self._values > MAX_JSON_VALUES:
                    text = f"The body holds over {MAX_JSON_VALUES:,} values; no call takes so many."
                    raise self._refusal(400, text, "too_many_values")
        return message

    async def send(self, message: Message) -> None:
        """Out to the caller, with the headers that every answer carries."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = MutableHeaders(raw=message["headers"])
            own["X-Request-Id"] = self.id
            for name, value in ANSWER_HEADERS.items():
                own.setdefault(name, value)
            if own.get("content-type", "").startswith("text/html"):
                own["Content-Security-Policy"] = CONTENT_POLICY
        if self._refused and message["type"] == "http.response.body" and not message.get("more_body"):
            await self._send({**message, "more_body": True})
            await self._read_the_rest()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def _read_the_rest(self) -> None:
        """Takes a little more of a refused body: a caller that is cut off while sending reads no answer."""
        end = time.monotonic() + LINGER_SECONDS
        while not self._whole and (left := end - time.monotonic()) > 0:
            try:
                message = await asyncio.wait_for(self._receive(), left)
            except asyncio.TimeoutError:
                return
            self._whole = not message.get("more_body", False)

    @property
    def _size_rule(self) -> str:
        return f"is larger than the {self._limits.body_bytes:,} bytes that this server takes."

    def _refusal(self, status: int, message: str, code: str) -> ApiError:
        self._refused = True
        return ApiError(status, message, code=code, headers={"Connection": "close"})


def _netloc(origin: str) -> str:
    """host:port of an origin; empty for what is none, such as "null"."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


async def _send_error(error: ApiError, send: Send) -> None:
    body = json.dumps(error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(k.lower().encode(), v.encode()) for k, v in (error.headers or {}).items()]
    await send({"type": "http.response.start", "status": error.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
