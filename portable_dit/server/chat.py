"""POST /v1/chat/completions: the last message of the user is the prompt, its pictures are the references."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import ValidationError

from portable_dit.server.answers import (
    MEDIA_TYPES,
    MIB,
    SSE_HEADERS,
    Blobs,
    event,
    facts,
    json_answer,
    stage_seconds,
    timing_headers,
)
from portable_dit.server.images import Serving
from portable_dit.server.references import bytes_of
from portable_dit.server.refusal import FIELDS, ApiError
from portable_dit.server.routes import OnceRoute
from portable_dit.server.schema import Chat, ChatExtra, Part
from portable_dit.server.service import KEEPALIVE_SECONDS, Service
from portable_dit.server.ticket import Ticket
from portable_dit.server.wording import problems_of, refused

router = APIRouter(tags=["chat"], route_class=OnceRoute)
SYSTEM_ROLES = ("system", "developer")
NOTHING_COUNTED = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
LANGUAGE_FIELDS = ("temperature", "top_p", "max_tokens", "max_completion_tokens")


@router.post("/v1/chat/completions", summary="Pictures as the answer of a chat")
async def completions(body: Chat, http: Request, service: Serving) -> Response:
    """`choices[0].message.content[k].image_url.url` is picture k as a data URL."""
    wish = with_system_message(merged(body), body)
    prompt, urls, notes = last_message(body)
    references = await asyncio.to_thread(_read_all, service, urls)
    size = None
    if wish.width is not None or wish.height is not None:
        if wish.width is None or wish.height is None or wish.size is not None:
            raise ApiError(400, "width and height: give both and no size, or neither.", param="width")
        size = wish.width, wish.height
    request = await service.resolve(
        wish, prompt, references, size=size, format=wish.output_format, names=names_of(body)
    )
    ticket = service.accept(request, client=http.state.client)
    if body.stream:
        counted = body.stream_options is not None and body.stream_options.include_usage is True
        stream = _stream(http, service, ticket, notes, usage=counted)
        return StreamingResponse(stream, media_type="text/event-stream", headers=SSE_HEADERS)
    await service.finished(ticket, http)
    blobs = Blobs()
    document = _document(service, ticket, "chat.completion")
    message = {"role": "assistant", "content": content_of(ticket, blobs)}
    document["choices"] = [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}]
    document["usage"] = NOTHING_COUNTED
    assert ticket.summary is not None
    document["portable_dit"] = facts(ticket, ticket.summary)
    document["portable_dit"]["notes"] += notes
    return await json_answer(document, blobs, timing_headers(ticket))


def names_of(body: Chat) -> dict[str, str]:
    """What this call names the fields of a request; a system prompt may have come as a message."""
    extra = body.extra_body
    counts = [body.num_outputs_per_prompt, None if extra is None else extra.num_outputs_per_prompt]
    images = FIELDS["images"] if counts == [None, None] else "num_outputs_per_prompt"
    system = "messages" if any(message.role in SYSTEM_ROLES for message in body.messages) else "system_prompt"
    places = {"prompt": "messages", "references": "image_url", "images": images, "system_prompt": system}
    return {**FIELDS, **places}


def merged(body: Chat) -> ChatExtra:
    """The fields of the body and of its extra_body together. Raises ApiError when they contradict."""
    known = tuple(ChatExtra.model_fields)
    values = {name: getattr(body, name) for name in known if getattr(body, name) is not None}
    extra = {} if body.extra_body is None else body.extra_body.model_dump(exclude_none=True)
    for name, value in extra.items():
        if values.setdefault(name, value) != value:
            raise ApiError(400, f"{name}: given at the top and in extra_body, and not the same.", param=name)
    count = values.pop("num_outputs_per_prompt", None)
    if count is not None and values.setdefault("n", count) != count:
        raise ApiError(400, "n and num_outputs_per_prompt: they mean the same. Give one.", param="n")
    return ChatExtra(**values)


def with_system_message(wish: ChatExtra, body: Chat) -> ChatExtra:
    """The wish with the system message as its system prompt, which the model takes or refuses."""
    texts = [message.content for message in body.messages if message.role in SYSTEM_ROLES and message.content]
    if not texts:
        return wish
    if len(texts) > 1 or not isinstance(texts[0], str) or wish.system_prompt is not None:
        raise ApiError(400, "messages: one system message of plain text, or system_prompt.", param="messages")
    return wish.model_copy(update={"system_prompt": texts[0]})


def last_message(body: Chat) -> tuple[str, list[str], list[str]]:
    """(prompt, addresses of references, notes on what of the conversation has no effect). Raises ApiError."""
    *earlier, last = body.messages
    if last.role != "user":
        raise ApiError(
            400, f"messages: the last is from the {last.role}; the user's is drawn.", param="messages"
        )
    earlier = [message for message in earlier if message.role not in SYSTEM_ROLES]
    notes = []
    if earlier:
        notes.append(f"messages: only the last is drawn; {len(earlier)} before it have no effect.")
    notes += [
        f"{name}: has no effect on a picture" for name in LANGUAGE_FIELDS if getattr(body, name) is not None
    ]
    if isinstance(last.content, str):
        return last.content, [], notes
    parts = [
        part if isinstance(part, Part) else _part(part, f"messages.{len(body.messages) - 1}.content.{number}")
        for number, part in enumerate(last.content or [])
    ]
    text = "\n".join(part.text for part in parts if part.text is not None)
    urls = [part.image_url.url for part in parts if part.image_url is not None]
    return text, urls, notes


def _part(part: object, place: str) -> Part:
    """A part that is drawn from, checked: earlier messages may hold parts of any kind. Raises ApiError."""
    try:
        return Part.model_validate(part)
    except ValidationError as error:
        raise refused(problems_of(error.errors(), Part, under=place)) from error


def _read_all(service: Service, urls: list[str]) -> list[bytes]:
    limits = service.settings.limits
    return [bytes_of(url, service.fetcher, param="image_url", limits=limits) for url in urls]


def content_of(ticket: Ticket, blobs: Blobs) -> list[dict[str, Any]]:
    """One part for each picture; the first also says what it took, as the clients of vLLM-Omni read it."""
    content: list[dict[str, Any]] = []
    for file in ticket.files:
        url = f"data:{MEDIA_TYPES[file.format]};base64,{blobs.marker(file.data)}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    assert ticket.summary is not None
    content[0]["stage_durations"] = stage_seconds(ticket)
    if ticket.summary.peak_bytes is not None:
        content[0]["peak_memory_mb"] = round(ticket.summary.peak_bytes / MIB, 1)
    return content


async def _stream(
    http: Request, service: Service, ticket: Ticket, notes: list[str], *, usage: bool
) -> AsyncIterator[bytes]:
    """The role at once, comments while it is drawn, the pictures in one piece, and the end.

    usage: whether the last chunk is one of what was counted.
    """
    document = _document(service, ticket, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {**document, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    yield event(None, json.dumps(chunk({"role": "assistant", "content": ""})).encode())
    finishing = asyncio.ensure_future(service.finished(ticket, http))
    try:
        while not (await asyncio.wait({finishing}, timeout=KEEPALIVE_SECONDS))[0]:
            yield b": drawing\n\n"
        failure = finishing.exception()
        if isinstance(failure, ApiError):
            yield event(None, json.dumps(failure.body).encode())
            return
        blobs = Blobs()
        content = content_of(ticket, blobs)
        yield event(None, await asyncio.to_thread(blobs.dump, chunk({"content": content})))
        assert ticket.summary is not None
        told = {**facts(ticket, ticket.summary), "notes": [*ticket.summary.notes, *notes]}
        yield event(None, json.dumps({**chunk({}, "stop"), "portable_dit": told}).encode())
        if usage:
            yield event(None, json.dumps({**document, "choices": [], "usage": NOTHING_COUNTED}).encode())
        yield event(None, b"[DONE]")
    finally:
        finishing.cancel()


def _document(service: Service, ticket: Ticket, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{ticket.id}",
        "object": kind,
        "created": int(time.time()),
        "model": service.model_name,
    }
