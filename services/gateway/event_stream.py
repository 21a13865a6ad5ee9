"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvern.services.gateway.errors import ApiError

DONE = "[DONE]"


class EventStream(Response):
    """Sends objects as events, then `[DONE]`; or, where the objects end in an ApiError, that as the last event.

    The generator is closed before the response returns, however it does: what it holds open ends with the client.
    """

    media_type = "text/event-stream"

    def __init__(self, objects: AsyncGenerator[dict[str, Any], None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache"})
        self._objects = objects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._objects) as objects:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for each in objects:
                    await send(_event(_compact(each)))
                await send(_event(DONE))
            except ApiError as error:
                await send(_event(_compact(error.body)))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _compact(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _event(data: str) -> dict[str, Any]:
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}
