"""Answers: pictures as JSON, without encoding megabytes twice, and server-sent events."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Response

from portable_dit.server.messages import PictureFile, Summary
from portable_dit.server.ticket import Ticket

MIB = 2**20
MEDIA_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
SSE_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}  # the latter for nginx, which would hold it


class Blobs:
    """Bytes that stand in a JSON document as base64; a `marker` takes their place until `dump`."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)
        self._blobs: list[bytes] = []

    def marker(self, data: bytes) -> str:
        self._blobs.append(data)
        return f"<{self._token}>"

    def dump(self, document: Mapping[str, Any]) -> bytes:
        """The document as JSON. Markers must stand in it in the order they were made."""
        text = json.dumps(document, ensure_ascii=True, separators=(",", ":")).encode()
        pieces = text.split(f"<{self._token}>".encode())
        assert len(pieces) == len(self._blobs) + 1
        joined = [pieces[0]]
        for blob, piece in zip(self._blobs, pieces[1:], strict=True):
            joined += [base64.b64encode(blob), piece]
        return b"".join(joined)


async def json_answer(document: Mapping[str, Any], blobs: Blobs, headers: Mapping[str, str]) -> Response:
    """A JSON response whose base64 is made off the event loop."""
    body = await asyncio.to_thread(blobs.dump, document)
    return Response(body, media_type="application/json", headers=dict(headers))


def event(name: str | None, data: bytes) -> bytes:
    """One server-sent event. data: JSON, which has no line ends."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + data + b"\n\n"


def timing_headers(ticket: Ticket) -> dict[str, str]:
    """Stage durations as Server-Timing, which browsers show, and the device's peak memory."""
    summary = ticket.summary
    assert summary is not None
    stages = stage_seconds(ticket)
    timing = ", ".join(f"{name};dur={seconds * 1e3:.1f}" for name, seconds in stages.items())
    headers = {"Server-Timing": timing}
    if summary.peak_bytes is not None:
        headers["X-Peak-Memory-MB"] = f"{summary.peak_bytes / MIB:.1f}"
    return headers


def stage_seconds(ticket: Ticket) -> dict[str, float]:
    """queue, then every stage over all pictures, then total from acceptance."""
    assert ticket.summary is not None
    assert ticket.started is not None
    stages = {"queue": ticket.started - ticket.accepted}
    stages |= {name: seconds for name, seconds in ticket.summary.seconds.items() if name != "total"}
    stages["encode_png"] = sum(file.seconds["encode_png"] for file in ticket.files)
    return stages | {"total": time.monotonic() - ticket.accepted}


def facts(ticket: Ticket, summary: Summary) -> dict[str, Any]:
    """What our answers say beyond OpenAI's, under the key portable_dit."""
    return {
        "id": ticket.id,
        "seeds": [file.seed for file in ticket.files],
        "seconds": {name: round(value, 6) for name, value in stage_seconds(ticket).items()},
        "peak_bytes": summary.peak_bytes,
        "notes": list(summary.notes),
    }


def sizes(files: Sequence[PictureFile]) -> str:
    return f"{files[0].width}x{files[0].height}"
