"""A small client of the server, for bench and eval, with nothing but the standard library.

For other OpenAI-compatible servers too: the judge of an evaluation may be one.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import secrets
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from portable_dit.errors import PortableDitError, UserError

KEY_VARIABLE = "PORTABLE_DIT_API_KEY"
RETRIES = 60  # of a full queue, each after the pause that it asks for


class ServerError(PortableDitError):
    """A server did not answer, or not with what was asked for."""


@dataclass(frozen=True)
class Client:
    """One server. url: http://host:port, with or without a path before /v1. key: sent as a bearer token.

    advice: what to do when nothing answers there.
    """

    url: str
    key: str | None = field(default=None, repr=False)
    timeout: float = 1800.0
    advice: str = "Start it with `portable-dit serve`, or check the address given with --server."

    @classmethod
    def of(cls, url: str, *, advice: str | None = None) -> Client:
        """The client for an address, with the key of PORTABLE_DIT_API_KEY. Raises UserError."""
        if not _is_address(url):
            raise UserError(f"{url}: not the address of a server. Say it as in http://127.0.0.1:8091.")
        found = cls(url.rstrip("/").removesuffix("/v1"), os.environ.get(KEY_VARIABLE))
        return found if advice is None else replace(found, advice=advice)

    def get(self, path: str) -> Any:
        """JSON of a GET. Raises ServerError."""
        return self._json(path, self._answer("GET", path, None, ""))

    def model(self) -> str:
        """The first model that it serves. Raises ServerError."""
        try:
            return str(self.get("/v1/models")["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise ServerError(f"{self.url}/v1/models: names no model. {self.advice}") from error

    def text(self, path: str) -> str:
        """Text of a GET. Raises ServerError."""
        return self._answer("GET", path, None, "").decode("utf-8", "replace")

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """JSON of a POST of JSON. A full queue is asked again. Raises ServerError."""
        return self._json(path, self._answer("POST", path, json.dumps(body).encode(), "application/json"))

    def draw(self, prompt: str, references: Sequence[bytes] = (), **fields: Any) -> bytes:
        """The file of one picture. Raises ServerError."""
        given = {name: value for name, value in fields.items() if value is not None}
        if references:
            body, kind = form({"prompt": prompt, **given}, references)
            answer = self._json("/v1/images/edits", self._answer("POST", "/v1/images/edits", body, kind))
        else:
            answer = self.post("/v1/images/generations", {"prompt": prompt, **given})
        try:
            return base64.b64decode(answer["data"][0]["b64_json"])
        except (LookupError, TypeError, ValueError) as error:
            raise ServerError(f"{self.url}: answered without a picture. {self.advice}") from error

    def _json(self, path: str, answer: bytes) -> Any:
        try:
            return json.loads(answer)
        except ValueError as error:
            text = answer[:60].decode("utf-8", "replace")
            raise ServerError(f"{self.url}{path}: answered {text!r}, no JSON. {self.advice}") from error

    def _answer(self, method: str, path: str, body: bytes | None, kind: str) -> bytes:
        for _ in range(RETRIES):
            status, headers, data = self._once(method, path, body, kind)
            if status != 429:
                break
            time.sleep(min(float(headers.get("Retry-After") or 1), 30.0))
        if not 200 <= status < 300:
            raise ServerError(f"{self.url}{path}: {status}: {_reason(data)}")
        return data

    def _once(
        self, method: str, path: str, body: bytes | None, kind: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        parts = urlsplit(self.url)
        connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = connect(parts.netloc, timeout=self.timeout)
        headers = {"Content-Type": kind} if kind else {}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            connection.request(method, parts.path + path, body, headers)
            with connection.getresponse() as response:
                return response.status, response.headers, response.read()
        except (OSError, ssl.SSLError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}: does not answer ({error}). {self.advice}") from error
        finally:
            connection.close()


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port beyond 65535, a bracket without its other half
        return False


def form(fields: Mapping[str, Any], files: Sequence[bytes]) -> tuple[bytes, str]:
    """(body, content type) of a form with pictures."""
    boundary = secrets.token_hex(16)
    pieces = []
    for name, value in fields.items():
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'
        pieces.append(f"{head}{value}\r\n".encode())
    for number, data in enumerate(files):
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="image[]"; filename="{number}"\r\n\r\n'
        pieces.append(head.encode() + data + b"\r\n")
    return b"".join(pieces) + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def _reason(data: bytes) -> str:
    """The message of an error in OpenAI's shape, or the start of whatever it is."""
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data[:200].decode("utf-8", "replace")
