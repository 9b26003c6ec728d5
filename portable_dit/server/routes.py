"""Routes whose JSON says every key once: of two values of one key, nobody knows which was meant."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute


class OnceRoute(APIRoute):
    """A route that refuses a JSON body with the same key twice, as one that is no JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_once(request: Request) -> Response:
            return await handle(_Request(request.scope, request.receive))

        return handle_once


class _Request(Request):
    async def json(self) -> Any:
        return json.loads(await self.body(), object_pairs_hook=_once)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise json.JSONDecodeError(f"the key {key[:60]!r} is said twice", "", 0)
    return found
