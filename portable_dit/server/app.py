"""The application: routes, errors in OpenAI's shape, and the life of the service behind them.

app = create_app(recipe, settings)      # an ASGI application; portable-dit serve runs it under uvicorn
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match

from portable_dit import __version__
from portable_dit.recipe import Recipe
from portable_dit.server import chat, images, jobs, schema, status
from portable_dit.server.gate import ANSWER_HEADERS, Gate
from portable_dit.server.messages import LoadFailed
from portable_dit.server.refusal import NOT_AGAIN, ApiError, error_body
from portable_dit.server.service import Service
from portable_dit.server.settings import Settings
from portable_dit.server.wording import problems_of, refused

# What pages of other sites may read of an answer, beside its body.
EXPOSED = ["Server-Timing", "X-Request-Id", "X-Peak-Memory-MB", "Retry-After", *NOT_AGAIN]
PAGE = Path(__file__).parent / "page"
BODIES: dict[str, type[schema.Body]] = {
    "/v1/images/generations": schema.Generation,
    "/v1/chat/completions": schema.Chat,
    "/v1/jobs": schema.JobWish,
}
DESCRIPTION = (
    "Pictures from Diffusion Transformers. Errors have OpenAI's shape: error.message says the way out."
)


def create_app(
    recipe: Recipe,
    settings: Settings,
    *,
    on_fatal: Callable[[LoadFailed], None] = lambda failed: None,
    log: Callable[[str], None] = lambda line: None,
) -> FastAPI:
    """The server's application. Its worker starts with it and ends with it.

    on_fatal: told when the recipe cannot be loaded. log: told a line for each request and event. Raises
    RecipeError, and UserError when the jobs file cannot be used.
    """
    service = Service(recipe, settings, on_fatal=on_fatal, log=log)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        await jobs.resume(service)
        yield
        await service.stop()

    app = FastAPI(
        title="portable-dit",
        version=__version__,
        description=DESCRIPTION,
        lifespan=life,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    for module in (images, chat, jobs, status):
        app.include_router(module.router)
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    app.add_api_route("/", page, include_in_schema=False)
    app.add_api_route("/docs", docs, include_in_schema=False)
    app.add_exception_handler(StarletteHTTPException, answer_error)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.add_exception_handler(sqlite3.Error, answer_unstored)
    app.add_exception_handler(Exception, answer_bug)
    app.add_middleware(Gate, settings=settings, metrics=service.metrics, log=log)
    if settings.cors_origins:  # around the gate: a browser asks first, without a key, and reads refusals too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=EXPOSED,
        )
    return app


async def page() -> Response:
    """The web page."""
    return FileResponse(PAGE / "index.html", headers={"Cache-Control": "no-cache"})


async def docs() -> Response:
    """The calls, drawn from /openapi.json by the page itself: no assets from elsewhere."""
    return FileResponse(PAGE / "docs.html", headers={"Cache-Control": "no-cache"})


async def answer_error(http: Request, error: Any) -> Response:
    """Any refusal, ours or the framework's, in OpenAI's shape."""
    if isinstance(error, ApiError):
        return JSONResponse(error.body, error.status_code, error.headers)
    message = {404: "No such address.", 405: "Not a method of this address."}.get(
        error.status_code, str(error.detail)
    )
    headers = {"Allow": _methods_of(http)} if error.status_code == 405 else error.headers
    return JSONResponse(error_body(error.status_code, message), error.status_code, headers)


def _methods_of(http: Request) -> str:
    """What may be asked of this address; of several routes the framework names the first one's."""
    taken = {
        method
        for method in ("DELETE", "GET", "PATCH", "POST", "PUT")
        for route in http.app.routes
        if route.matches({**http.scope, "method": method})[0] is Match.FULL
    }
    return ", ".join(sorted(taken | ({"HEAD"} if "GET" in taken else set())))


async def answer_invalid(http: Request, error: Any) -> Response:
    """What the framework found wrong with a body, or with what stands in the address."""
    errors = error.errors()
    body = BODIES.get(http.url.path) if errors[0]["loc"][0] == "body" else schema.LatestJobs
    problem = refused(problems_of([{**found, "loc": found["loc"][1:]} for found in errors], body))
    return JSONResponse(problem.body, problem.status_code)


async def answer_unstored(http: Request, error: Exception) -> Response:
    """The file of jobs cannot be written: a full disk, as a rule."""
    http.app.state.service.log(f"error: jobs cannot be stored: {error}")
    return JSONResponse(error_body(503, f"Jobs cannot be stored here now ({error}).", code="storage"), 503)


async def answer_bug(http: Request, error: Exception) -> Response:
    """Something that should not happen; the server's log has the traceback."""
    message = "The server failed on this request. Its log says why, under the id in X-Request-Id."
    headers = {**ANSWER_HEADERS, **NOT_AGAIN, "X-Request-Id": http.state.id}
    return JSONResponse(error_body(500, message, code="bug"), 500, headers)
