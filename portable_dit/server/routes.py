"""Routes whose JSON can be read in one way: of two values of one key, nobody knows which was meant."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from portable_dit.server.refusal import ApiError

MOST_NAMED = 60  # characters of a key


class OnceRoute(APIRoute):
    """A route that refuses a JSON body with the same key twice, and what is no JSON in bytes or numbers."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_once(request: Request) -> Response:
            return await handle(_Request(request.scope, request.receive))

        return handle_once


class _Request(Request):
    async def json(self) -> Any:
        body = await self.body()
        try:
            return json.loads(body, object_pairs_hook=_once)
        except UnicodeDecodeError as error:
            reason = f"byte {error.start} is not {error.encoding.upper()}"
            raise ApiError(400, f"The body is not text: {reason}. Send JSON in UTF-8.") from error
        except json.JSONDecodeError:
            raise  # told with its place, as all that is wrong with a body is
        except ValueError as error:  # Python reads no number of over 4,300 digits
            rule = "a number in it has too many digits. Send numbers that fields of this call take"
            raise ApiError(400, f"The body cannot be read: {rule}.") from error
        except RecursionError as error:
            raise ApiError(400, "The body is nested too deeply. Send a flat JSON object.") from error


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        key = key[:MOST_NAMED]
        raise ApiError(400, f"{key!r}: said twice in one object. Say it once.", param=key)
    return found
