"""Bodies that come slowly, or many at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvern.services.gateway.client_watch import SMALL_BODY_BYTES, ClientWatch
from tests.for_ever import for_ever

Message = dict[str, Any]


async def test_body_that_does_not_come_is_given_up() -> None:
    sent: list[Message] = []
    pieces = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive() -> Message:
        if not pieces:
            await for_ever()
        return pieces.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    async def app(*_: object) -> None:
        raise AssertionError("called without a body")

    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json; charset=utf-8")]}
    await asyncio.wait_for(ClientWatch(app, max_body_s=0.01)(scope, receive, send), 10)
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert b"took longer than 0.01 s" in sent[1]["body"]


class Client:
    """Sends a body, all or part of it, and leaves when it is told to."""

    def __init__(self, watch: ClientWatch, size: int, *, is_whole: bool = True) -> None:
        self.status = 0
        self.begun, self.leaves = asyncio.Event(), asyncio.Event()
        self._pieces = [{"type": "http.request", "body": b"x" * size, "more_body": not is_whole}]
        scope = {"type": "http", "method": "POST", "headers": []}
        self.asking = asyncio.create_task(watch(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if not self._pieces:
            self.begun.set()
            await self.leaves.wait()
            return {"type": "http.disconnect"}
        return self._pieces.pop()

    async def _send(self, message: Message) -> None:
        self.status = message.get("status", self.status)

    async def answered(self) -> int:
        await asyncio.wait_for(self.asking, 10)
        return self.status


@pytest.mark.parametrize("is_whole", [False, True])
async def test_large_bodies_at_once_are_bounded_and_small_ones_are_let_in(is_whole: bool) -> None:
    stays = True

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if stays:
            await for_ever()
        await Response(status_code=204)(scope, receive, send)

    large = SMALL_BODY_BYTES + 1000
    watch = ClientWatch(app, max_large_bodies_bytes=1500)
    first = Client(watch, large, is_whole=is_whole)
    await asyncio.wait_for(first.begun.wait(), 10)
    stays = False
    assert await Client(watch, large).answered() == 429
    assert await Client(watch, SMALL_BODY_BYTES).answered() == 204
    first.leaves.set()
    assert await first.answered() == 0
    assert [await Client(watch, large).answered() for _ in range(3)] == [204] * 3
