"""POST /v1/images/generations and /v1/images/edits, whole or as a stream, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse

from portable_dit.request import ResolvedRequest
from portable_dit.server.answers import (
    SSE_HEADERS,
    Blobs,
    event,
    facts,
    json_answer,
    sizes,
    timing_headers,
)
from portable_dit.server.forms import edit_of, read_form
from portable_dit.server.messages import PictureFile, Stepped
from portable_dit.server.routes import OnceRoute
from portable_dit.server.schema import Edit, Generation, ImageWish
from portable_dit.server.service import Service, watch
from portable_dit.server.ticket import Ticket, cancelled

router = APIRouter(tags=["images"], route_class=OnceRoute)
DEFAULT_QUALITY = 92


def service_of(http: Request) -> Service:
    service: Service = http.app.state.service
    return service


Serving = Annotated[Service, Depends(service_of)]


@router.post("/v1/images/generations", summary="Pictures from a prompt")
async def generations(body: Generation, http: Request, service: Serving) -> Response:
    """The picture, or with `stream` its previews and then it."""
    request = await service.resolve(body, body.prompt, (), format=body.output_format)
    return await answer(http, service, request, body, kind="image_generation")


EDIT_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    **Edit.model_json_schema(),
                    "properties": {
                        **Edit.model_json_schema()["properties"],
                        "image[]": {"type": "array", "items": {"type": "string", "format": "binary"}},
                        "image": {"type": "string", "format": "binary"},
                    },
                }
            }
        },
    }
}


@router.post("/v1/images/edits", summary="Pictures from a prompt and references", openapi_extra=EDIT_BODY)
async def edits(http: Request, service: Serving) -> Response:
    """Multipart form: the references as `image` or several `image[]`, the rest as for generations."""
    async with read_form(http, service.spec.max_references) as form:
        body, files = edit_of(form)
        data = [await file.read() for file in files]
    request = await service.resolve(body, body.prompt, data, format=body.output_format)
    return await answer(http, service, request, body, kind="image_edit")


def preview_steps(steps: int, count: int) -> frozenset[int]:
    """The steps after which a stream of so many partial images shows one: evenly spread, never the last."""
    chosen = {round(steps * (k + 1) / (count + 1)) for k in range(count)}
    return frozenset(step for step in chosen if 1 <= step < steps)


async def answer(
    http: Request, service: Service, request: ResolvedRequest, body: ImageWish, *, kind: str
) -> Response:
    """Draws a checked request and answers in the way that was asked for."""
    quality = DEFAULT_QUALITY if body.output_compression is None else body.output_compression
    previews = preview_steps(request.steps, body.partial_images or 0) if body.stream else frozenset()
    ticket = service.accept(request, client=http.state.client, preview_steps=previews, quality=quality)
    if body.stream:
        stream = _stream(http, ticket, kind)
        return StreamingResponse(stream, media_type="text/event-stream", headers=SSE_HEADERS)
    await service.finished(ticket, http)
    blobs = Blobs()
    if body.response_format == "url":
        await service.store.keep(ticket.id, ticket.files)
        data = [{"url": picture_url(http, ticket.id, k, f.format)} for k, f in enumerate(ticket.files)]
    else:
        data = [{"b64_json": blobs.marker(file.data)} for file in ticket.files]
    return await json_answer(images_document(ticket, data), blobs, timing_headers(ticket))


def images_document(ticket: Ticket, data: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """OpenAI's ImagesResponse, with what we know beyond it under a key of its own."""
    assert ticket.summary is not None
    return {
        "created": int(time.time()),
        "background": "opaque",
        "output_format": ticket.files[0].format,
        "size": sizes(ticket.files),
        "data": list(data),
        "portable_dit": facts(ticket, ticket.summary),
    }


def picture_url(http: Request, owner: str, number: int, format: str) -> str:
    """The address of a kept picture, under the name that the caller reached us by."""
    return f"{http.url.scheme}://{http.url.netloc}/v1/pictures/{owner}/{number}.{format}"


async def _stream(http: Request, ticket: Ticket, kind: str) -> AsyncIterator[bytes]:
    """Partial images as they come, each picture when it is done; a comment when nothing happens for long."""
    seen, partials = -1, 0
    sent: set[int] = set()  # seeds of the pictures that were sent; replicas may finish in another order
    try:
        async for changed in watch(ticket, http):
            if not changed:
                yield b": waiting\n\n"
            for number, (step, preview) in list(ticket.previews.items()):
                if number > seen:
                    yield _partial(step, preview, partials, kind)
                    seen, partials = number, partials + 1
            for file in [file for file in ticket.files if file.seed not in sent]:
                yield await asyncio.to_thread(_completed, file, kind)
                sent.add(file.seed)
        if ticket.failure is not None:
            yield event("error", json.dumps({"type": "error", **ticket.failure.body}).encode())
    finally:
        if not ticket.is_over:
            ticket.cancel(cancelled("the caller has left"))


# Tokens are not what these models count in; the clients' types want the fields.
NO_USAGE = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
}


def _partial(step: Stepped, preview: bytes, index: int, kind: str) -> bytes:
    name, blobs = f"{kind}.partial_image", Blobs()
    document = _event_facts(name, blobs.marker(preview), "auto")
    document |= {"output_format": "png", "partial_image_index": index, "image": step.image}
    document |= {"step": step.step, "steps": step.steps}
    return event(name, blobs.dump(document))


def _completed(file: PictureFile, kind: str) -> bytes:
    name, blobs = f"{kind}.completed", Blobs()
    document = _event_facts(name, blobs.marker(file.data), f"{file.width}x{file.height}")
    document |= {"output_format": file.format, "seed": file.seed, "usage": NO_USAGE}
    return event(name, blobs.dump(document))


def _event_facts(name: str, marker: str, size: str) -> dict[str, Any]:
    return {
        "type": name,
        "b64_json": marker,
        "created_at": int(time.time()),
        "size": size,
        "quality": "auto",
        "background": "opaque",
    }
