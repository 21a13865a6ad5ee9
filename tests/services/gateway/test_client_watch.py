"""Bodies that come slowly."""

from __future__ import annotations

import asyncio
from typing import Any

from kvern.services.gateway.client_watch import ClientWatch
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
