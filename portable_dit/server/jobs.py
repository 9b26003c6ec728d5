"""/v1/jobs: submit, watch, cancel, and fetch later; kept across a restart of the server."""

from __future__ import annotations

import asyncio
import base64
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError

from portable_dit.server.answers import MEDIA_TYPES, SSE_HEADERS, Blobs, event, facts, json_answer
from portable_dit.server.images import DEFAULT_QUALITY, Serving, picture_url
from portable_dit.server.job_store import StoredJob
from portable_dit.server.references import bytes_of
from portable_dit.server.refusal import FIELDS, ApiError, error_body
from portable_dit.server.routes import OnceRoute
from portable_dit.server.schema import JobWish, LatestJobs
from portable_dit.server.service import STOPPING, Service, watch
from portable_dit.server.ticket import Ticket, cancelled
from portable_dit.server.wording import problems_of, refused

router = APIRouter(tags=["jobs"], route_class=OnceRoute)
STORE_SECONDS = 5.0


@router.post("/v1/jobs", status_code=202, summary="Submit a job")
async def submit(body: JobWish, http: Request, service: Serving) -> Response:
    """Answers as soon as the job is in the queue."""
    ticket = await accept_job(service, body, body.images, client=http.state.client)
    wish = body.model_dump(exclude_none=True, exclude={"images"}) | {"seed": ticket.request.seed}
    try:
        await service.store.add(ticket.id, ticket.client, wish, body.images)
    except sqlite3.Error:  # answered by the application; nobody could fetch what is drawn
        ticket.cancel(cancelled("the job could not be stored"))
        raise
    service.spawn(follow(service, ticket), writes=True)
    job = await _job(service, ticket.id, ticket.client)
    return JSONResponse(_document(http, service, job), 202, {"Location": f"/v1/jobs/{ticket.id}"})


@router.get("/v1/jobs", summary="One's latest jobs, the newest first")
async def latest(http: Request, service: Serving, wish: Annotated[LatestJobs, Query()]) -> Response:
    jobs = await service.store.latest(http.state.client, wish.limit)
    return JSONResponse({"object": "list", "data": [_document(http, service, job) for job in jobs]})


@router.get("/v1/jobs/{id}", summary="How a job stands")
async def status(id: str, http: Request, service: Serving) -> Response:
    return JSONResponse(_document(http, service, await _job(service, id, http.state.client)))


@router.get("/v1/jobs/{id}/events", summary="What happens to a job, as server-sent events")
async def events(id: str, http: Request, service: Serving) -> Response:
    """queued, step (with a preview where the job has `previews`), and last how it ended."""
    job = await _job(service, id, http.state.client)
    stream = _events(http, service, job)
    return StreamingResponse(stream, media_type="text/event-stream", headers=SSE_HEADERS)


@router.post("/v1/jobs/{id}/cancel", summary="Stop a job at its next step")
async def cancel(id: str, http: Request, service: Serving) -> Response:
    await _job(service, id, http.state.client)
    ticket = service.tickets.get(id)
    if ticket is not None:
        ticket.cancel(cancelled("by its owner"))
        await _ended_in_store(service, ticket)
    return JSONResponse(_document(http, service, await _job(service, id, http.state.client)))


@router.delete("/v1/jobs/{id}", status_code=204, summary="Forget a job and its pictures")
async def forget(id: str, http: Request, service: Serving) -> Response:
    await cancel(id, http, service)
    await service.store.remove(id)
    return Response(status_code=204)


@router.get("/v1/jobs/{id}/result", summary="The pictures of a finished job")
async def result(id: str, http: Request, service: Serving) -> Response:
    """As generations answers. 409 while there is no result, or when there will be none."""
    job = await _job(service, id, http.state.client)
    if job.status != "finished":
        message = (job.error or {}).get("message", "Ask again later, or watch its events.")
        raise ApiError(409, f"The job is {job.status}. {message}", code=f"job_{job.status}")
    if not job.pictures:
        raise ApiError(410, "The pictures of this job have expired.", code="expired")
    data, blobs = [], Blobs()
    for picture in job.pictures:
        found = await service.store.picture(id, picture.number)
        if found is None:
            raise ApiError(410, "The pictures of this job have just expired.", code="expired")
        data.append({"b64_json": blobs.marker(found[1]), "seed": picture.seed})
    document = {"created": int(job.finished or 0), "data": data, "portable_dit": job.facts}
    return await json_answer(document, blobs, {})


@router.get("/v1/pictures/{owner}/{name}", summary="A picture by its address")
async def picture(owner: str, name: str, service: Serving) -> Response:
    """Needs no key: the address holds 96 random bits."""
    number, _, format = name.partition(".")
    found = None
    if number.isdecimal() and number.isascii() and len(number) < 4 and len(owner) < 100:
        found = await service.store.picture(owner, int(number))
    if found is None or found[0] != format:
        raise ApiError(404, "No such picture, or it has expired.", code="not_found")
    headers = {"Cache-Control": "private, max-age=3600, immutable"}
    return Response(found[1], media_type=MEDIA_TYPES[format], headers=headers)


async def accept_job(
    service: Service,
    body: JobWish,
    references: list[str],
    *,
    client: str,
    id: str | None = None,
) -> Ticket:
    """The ticket of a job. id: of one that was accepted before a restart, and is accepted again."""
    limits = service.settings.limits

    def read() -> list[bytes]:
        return [
            bytes_of(text, service.fetcher, param=f"images.{k}", limits=limits)
            for k, text in enumerate(references)
        ]

    files = await asyncio.to_thread(read)
    request = await service.resolve(
        body, body.prompt, files, format=body.output_format, names={**FIELDS, "references": "images"}
    )
    return service.accept(
        request,
        client=client,
        preview_steps=frozenset(range(1, request.steps)) if body.previews else frozenset(),
        quality=DEFAULT_QUALITY if body.output_compression is None else body.output_compression,
        id=id,
        again=id is not None,
    )


async def follow(service: Service, ticket: Ticket) -> None:
    """Writes down what becomes of a job."""
    noted = False
    async for _ in ticket.changes():
        if ticket.status == "running" and not noted:
            noted = True
            with suppress(sqlite3.Error):  # its end tells if it cannot be stored, or says more than this
                await service.store.running(ticket.id)
    if ticket.failure is None:
        assert ticket.summary is not None
        told = facts(ticket, ticket.summary)
        end = partial(service.store.ended, ticket.id, ticket.status, files=ticket.files, facts=told)
    elif ticket.failure.code == STOPPING:
        return  # the next start says that it was interrupted, or draws it
    else:
        end = partial(service.store.ended, ticket.id, ticket.status, error=ticket.failure.body["error"])
    pause = 0.0  # a full disk may still have room for a sentence, or has some later
    while (error := await _failure_of(end)) is not None:
        service.log(f"error: the end of job {ticket.id} cannot be stored: {error}")
        if ticket.failure is None:
            lost = error_body(503, f"Its pictures could not be stored ({error}).", code="storage")
            end = partial(service.store.ended, ticket.id, "failed", error=lost["error"])
        await asyncio.sleep(pause)
        pause = STORE_SECONDS


async def _failure_of(write: Callable[[], Awaitable[None]]) -> sqlite3.Error | None:
    try:
        await write()
    except sqlite3.Error as error:
        return error
    return None


async def resume(service: Service) -> None:
    """Jobs that waited when the server ended wait again; what cannot be accepted any more says why."""
    for job in await service.store.restart():
        await _resume(service, job)


async def _resume(service: Service, job: StoredJob) -> None:
    try:
        wish = wish_of(job)
        references = await service.store.references(job.id)
        ticket = await accept_job(service, wish, references, client=job.client, id=job.id)
    except ApiError as error:
        await service.store.ended(job.id, "failed", error=error.body["error"])
    else:
        service.spawn(follow(service, ticket), writes=True)


def wish_of(job: StoredJob) -> JobWish:
    """What a stored job asks for. Raises ApiError when this version does not take it any more."""
    try:
        return JobWish.model_validate(job.wish)
    except ValidationError as error:
        raise refused(problems_of(error.errors(), JobWish)) from error


async def _job(service: Service, id: str, client: str) -> StoredJob:
    """A client's own job; another's looks like none."""
    job = await service.store.find(id) if len(id) < 100 else None
    if job is None or job.client != client:
        raise ApiError(404, "No such job, or it has expired.", code="not_found")
    return job


async def _ended_in_store(service: Service, ticket: Ticket) -> None:
    """Until `follow` has written the end of a job that is over, which is a matter of milliseconds.

    Not of one that a stop has ended: it is as it was at the next start, or told then.
    """
    end = time.monotonic() + STORE_SECONDS
    while (job := await service.store.find(ticket.id)) is not None and job.status in ("queued", "running"):
        if ticket.failure is not None and ticket.failure.code == STOPPING:
            return
        if time.monotonic() > end:
            raise ApiError(503, "The end of this job could not be stored; see the log.", code="storage")
        await asyncio.sleep(0.005)


def _document(http: Request, service: Service, job: StoredJob) -> dict[str, Any]:
    """A job as JSON: as it was stored, with the progress of a living one."""
    ticket = service.tickets.get(job.id)
    document: dict[str, Any] = {
        "id": job.id,
        "object": "image.job",
        "created": int(job.created),
        "status": job.status,
        "request": job.wish,
        "references": job.references,
        "error": job.error,
        "images": [
            {
                "url": picture_url(http, job.id, stored.number, stored.format),
                "size": f"{stored.width}x{stored.height}",
                "seed": stored.seed,
            }
            for stored in job.pictures
        ],
        "portable_dit": job.facts,
    }
    if job.finished is not None:
        document["finished"] = int(job.finished)
        document["expires"] = int(job.finished + service.settings.keep_seconds)
    if ticket is not None and job.status in ("queued", "running"):
        document |= progress_of(service, ticket)
    return document


def progress_of(service: Service, ticket: Ticket) -> dict[str, Any]:
    total, done = ticket.request.steps * ticket.request.images, ticket.steps_done
    return {
        "position": service.queue.position(ticket),
        "progress": round(done / total, 4),
        "step": done,
        "steps": total,
    }


async def _events(http: Request, service: Service, job: StoredJob) -> AsyncIterator[bytes]:
    """The events of a living job as they come; of an ended one, the end."""
    ticket = service.tickets.get(job.id)
    if ticket is not None:
        async for piece in _living(http, service, ticket):
            yield piece
        await _ended_in_store(service, ticket)
    ended = await service.store.find(job.id)
    if ended is not None and ended.status not in ("queued", "running"):
        document = _document(http, service, ended)
        yield event(ended.status, json.dumps({"type": ended.status, **document}).encode())


async def _living(http: Request, service: Service, ticket: Ticket) -> AsyncIterator[bytes]:
    seen, told = -1, None
    async for changed in watch(ticket, http):
        if not changed:
            yield b": waiting\n\n"
        if ticket.is_over:
            continue  # the last change; its event comes from the store
        now = progress = {"type": ticket.status, **progress_of(service, ticket)}
        if ticket.previews and max(ticket.previews) > seen:
            seen = max(ticket.previews)
            step, preview = ticket.previews[seen]
            now = progress | {"image": step.image, "preview": _data_url(preview)}
        if now != told:
            yield event("step" if ticket.status == "running" else "queued", json.dumps(now).encode())
            told = progress


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
