"""What runs here and whether it can draw: probes, models, facts and metrics."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from portable_dit import __version__
from portable_dit.server.images import Serving
from portable_dit.server.refusal import ApiError

router = APIRouter(tags=["status"])


@router.get("/health", summary="The server answers")
async def health() -> dict[str, str]:
    """Liveness: 200 as long as the server runs, whatever its workers do."""
    return {"status": "ok"}


@router.get("/ready", summary="A worker can draw")
async def ready(service: Serving) -> Response:
    """Readiness: 503 while loading, while a worker is started again, and while the server is stopping."""
    state: dict[str, Any] = {"ready": service.ready}
    for replica in service.replicas:
        if replica.loading is not None and not replica.ready:
            state["loading"] = {
                "component": replica.loading.component,
                "done_bytes": replica.loading.done,
                "total_bytes": replica.loading.total,
            }
    if service.queue.refusing is not None:
        state["reason"] = service.queue.refusing.detail
    elif not service.ready:
        state["reason"] = "no worker is ready: loading, or being started again"
    return JSONResponse(state, 200 if service.ready else 503)


@router.get("/v1/models", summary="The served model")
async def models(service: Serving) -> dict[str, Any]:
    return {"object": "list", "data": [_model(service)]}


@router.get("/v1/models/{id:path}", summary="Facts of the served model")
async def model(id: str, service: Serving) -> dict[str, Any]:
    if id not in (service.model_name, service.spec.id):
        raise ApiError(404, f"model: {id[:100]} is not served here.", code="model_not_found", param="model")
    return _model(service)


def _model(service: Serving) -> dict[str, Any]:
    spec, sizes = service.spec, service.spec.sizes
    return {
        "id": service.model_name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "portable-dit",
        "portable_dit": {
            "default_size": "{}x{}".format(*sizes.default),
            "multiple": sizes.multiple,
            "min_side": sizes.min_side,
            "max_side": sizes.max_side,
            "max_pixels": sizes.max_pixels,
            "max_ratio": sizes.max_ratio,
            "resolutions": [tier.name for tier in sizes.tiers],
            "steps": list(spec.steps),
            "has_guidance": spec.has_guidance,
            "max_references": spec.max_references,
            "max_prompt_characters": spec.max_prompt_characters,
            "max_images": service.settings.limits.images,
        },
    }


@router.get("/server_info", summary="Recipe, plan, kernels, notes and versions")
async def server_info(service: Serving) -> dict[str, Any]:
    limits = service.settings.limits
    return {
        "version": __version__,
        "model": service.model_name,
        "uptime_seconds": round(time.time() - service.started, 1),
        "accepts": service.queue.refusing is None,
        "queue": {"waiting": len(service.queue.queued()), "seconds_ahead": service.queue.seconds_ahead()},
        "limits": {name: getattr(limits, name) for name in limits.__dataclass_fields__},
        "workers": [
            {
                "ready": replica.ready,
                "pid": replica.pid,
                "starts": replica.starts,
                "drawing": [ticket.id for ticket in replica.drawing],
                "resident_bytes": None if replica.pong is None else replica.pong.resident_bytes,
                "device_bytes": None if replica.pong is None else replica.pong.device_bytes,
                "energy_joules": None if replica.pong is None else replica.pong.energy_joules,
                **(replica.facts or {}),
            }
            for replica in service.replicas
        ],
    }


@router.get("/metrics", summary="For Prometheus")
async def metrics(service: Serving) -> Response:
    return Response(service.measure(), media_type=CONTENT_TYPE_LATEST)
