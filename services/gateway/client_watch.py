"""Middleware that reads a request within bounds and ends its work when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvern.services.gateway.errors import ApiError

MAX_BODY_BYTES = 8 * 1024 * 1024
SMALL_BODY_BYTES = 64 * 1024
MAX_LARGE_BODIES_BYTES = 64 * 1024 * 1024
"""Of all bodies of requests in flight, what is beyond SMALL_BODY_BYTES of each. In use, a body takes several times its
size, and it may be sent slowly by anybody; small ones always have room.
"""

MAX_BODY_S = 60.0
"""How long a body may take to come, in seconds."""

MAX_HEADERS = 100


class ClientGone(Exception):
    """The client closed the connection."""


class ClientWatch:
    """Runs each request as a task, which is cancelled at once when the client disconnects."""

    def __init__(
        self, app: ASGIApp, max_body_s: float = MAX_BODY_S, max_large_bodies_bytes: int = MAX_LARGE_BODIES_BYTES
    ) -> None:
        self._app = app
        self._max_body_s = max_body_s
        self._room = max_large_bodies_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._taking_room() as take:
            try:
                _check_headers(scope)
                body = await self._body(receive, take)
            except ClientGone:
                return
            except ApiError as error:
                await error.response(scope, receive, send)
                return
            await _run(self._answer(scope, _replay(body), send), receive)

    @contextmanager
    def _taking_room(self) -> Iterator[Callable[[int], None]]:
        """Give what takes room for a body of a size, anew as it grows. Raises ApiError where there is none."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            more = max(size - SMALL_BODY_BYTES, 0) - taken
            if more > self._room:
                message = "the bodies of requests in flight leave no room for this one"
                raise ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"})
            self._room -= more
            taken += more

        try:
            yield take
        finally:
            self._room += taken

    async def _body(self, receive: Receive, take: Callable[[int], None]) -> bytes:
        try:
            async with asyncio.timeout(self._max_body_s):
                return await _read_body(receive, take)
        except TimeoutError as error:
            headers = {"Connection": "close"}
            raise ApiError(408, f"the body took longer than {self._max_body_s:g} s", headers=headers) from error

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _check_headers(scope: Scope) -> None:
    if len(scope["headers"]) > MAX_HEADERS:
        raise ApiError(431, f"a request may have {MAX_HEADERS} headers, this one has {len(scope['headers'])}")


async def _read_body(receive: Receive, take: Callable[[int], None]) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body may be {MAX_BODY_BYTES} bytes long at most")
        take(len(body))
        if not message.get("more_body", False):
            return bytes(body)


def _replay(body: bytes) -> Receive:
    """Return a `receive` that gives the body, then nothing more."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.get_running_loop().create_future()  # for ever: a disconnect cancels who waits here
        return messages.pop()

    return receive


async def _run(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    working, gone = asyncio.create_task(work), asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.wait((working, gone))
    if not working.cancelled():
        working.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
