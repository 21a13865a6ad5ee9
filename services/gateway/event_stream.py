"""Server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvern.services.gateway.answers import Usage
from kvern.services.gateway.errors import ApiError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, and proxies see that the connection is not idle."""

KEEP_ALIVE_S = 15.0
"""Proxies give up on a silent connection after 30 to 60 seconds."""


class EventStream(Response):
    """Sends events, then `[DONE]`; or, where they end in an ApiError, that as the last event.

    An error before the first event is raised, so that it has a status of its own; but the answer has begun once the
    first event has kept the client waiting for KEEP_ALIVE_S. The generator is closed before the response returns,
    however it does: what it holds open ends with the client.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self.status_code = 200
        self.background = None
        # X-Accel-Buffering: nginx would gather events otherwise.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._begins = asyncio.Lock()
        self._has_begun = False
        self._sent_at = 0.0
        """Of the loop's clock."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events, self._keeping_alive(send):
            try:
                async for event in events:
                    await self._send(send, event)
                await self._send(send, DONE)
            except ApiError as error:
                if not self._has_begun:
                    raise
                await self._send(send, b"data: " + to_json(error.body) + b"\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, event: bytes) -> None:
        if not self._has_begun:
            await self._begin(send)
        self._sent_at = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": event, "more_body": True})

    async def _begin(self, send: Send) -> None:
        async with self._begins:
            if not self._has_begun:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self._has_begun = True

    @asynccontextmanager
    async def _keeping_alive(self, send: Send) -> AsyncIterator[None]:
        ticking = asyncio.create_task(self._keep_alive(send))
        try:
            yield
        finally:
            ticking.cancel()

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        while True:
            silent_s = loop.time() - self._sent_at
            if silent_s >= self._keep_alive_s:
                await self._send(send, KEEP_ALIVE)
            else:
                await asyncio.sleep(self._keep_alive_s - silent_s)


class ChunkWriter:
    """Writes the chunks of one answer: what they share is written once, since there is a chunk for each token."""

    def __init__(self, head: dict[str, Any], *, has_usage: bool) -> None:
        """has_usage: each chunk has the field, empty until usage is told."""
        self._head = b"data: " + to_json(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"

    def chunk(self, choice: dict[str, Any], usage: Usage | None = None) -> bytes:
        return b"".join((self._head, to_json(choice), self._tail if usage is None else _usage(usage)))

    def usage(self, usage: Usage) -> bytes:
        """Write a chunk of usage alone."""
        return self._head + _usage(usage)


def _usage(usage: Usage) -> bytes:
    return b'],"usage":' + to_json(usage) + b"}\n\n"
