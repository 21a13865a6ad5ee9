"""Streams of events: silence, errors, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from kvern.services.gateway.errors import ApiError
from kvern.services.gateway.event_stream import DONE, KEEP_ALIVE, EventStream
from tests.for_ever import for_ever

Message = dict[str, Any]


class Client:
    """Keeps what is sent, and tells when a piece came."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.got = {KEEP_ALIVE: asyncio.Event(), b"a": asyncio.Event()}

    async def send(self, message: Message) -> None:
        self.messages.append(message)
        if (event := self.got.get(message.get("body", b""))) is not None:
            event.set()

    @property
    def body(self) -> list[bytes]:
        assert [message["type"] for message in self.messages].count("http.response.start") == 1
        return [message["body"] for message in self.messages[1:]]


async def run(events: AsyncGenerator[bytes, None], client: Client, keep_alive_s: float = 60) -> None:
    await EventStream(events, keep_alive_s)({"type": "http"}, asyncio.Event().wait, client.send)


async def test_silence_before_and_after_the_first_event_is_broken_by_comments() -> None:
    client = Client()

    async def events() -> AsyncGenerator[bytes, None]:
        for event in (b"a", b"b"):
            client.got[KEEP_ALIVE].clear()
            await client.got[KEEP_ALIVE].wait()
            yield event

    await run(events(), client, keep_alive_s=0.01)
    assert [each for each in client.body if each != KEEP_ALIVE] == [b"a", b"b", DONE, b""]
    assert client.body[0] == KEEP_ALIVE
    assert KEEP_ALIVE in client.body[client.body.index(b"a") : client.body.index(b"b")]


async def test_events_without_silence_come_without_comments() -> None:
    client = Client()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"a"

    await run(events(), client)
    assert client.body == [b"a", DONE, b""]
    assert client.messages[-1]["more_body"] is False


async def test_error_after_a_comment_is_an_event_and_before_it_is_raised() -> None:
    client = Client()

    async def events() -> AsyncGenerator[bytes, None]:
        await client.got[KEEP_ALIVE].wait()
        raise ApiError(503, "gone")
        yield b""

    await run(events(), client, keep_alive_s=0.01)
    assert b'"message":"gone"' in client.body[-2]
    assert DONE not in client.body

    async def fails_at_once() -> AsyncGenerator[bytes, None]:
        raise ApiError(503, "gone")
        yield b""

    with pytest.raises(ApiError):
        await run(fails_at_once(), Client())


async def test_generator_is_closed_before_a_cancelled_response_returns() -> None:
    client, closed = Client(), []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"a"
            await for_ever()
        finally:
            closed.append(True)

    running = asyncio.create_task(run(events(), client))
    await client.got[b"a"].wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert closed == [True]
    assert len(asyncio.all_tasks()) == 1
