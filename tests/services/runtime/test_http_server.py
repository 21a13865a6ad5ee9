"""Clients that take their time to say what they want."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.responses import PlainTextResponse

from kvern.services.runtime import http_server
from kvern.services.runtime.http_server import bind, serving

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    with bind("127.0.0.1:0") as listener:
        async with serving(PlainTextResponse("hello"), [listener], grace_s=1):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            try:
                yield reader, writer
            finally:
                writer.close()


@pytest.mark.parametrize("sent", [b"", HEAD[:-2], HEAD + HEAD[:5]])
async def test_connection_whose_head_does_not_come_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_HEAD_S", 0.1)
    async with connected() as (reader, writer):
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 10)
    assert answer.count(b"hello") == (1 if sent.startswith(HEAD) else 0)


async def test_request_may_take_longer_than_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_HEAD_S", 0.1)
    async with connected() as (reader, writer):
        for end in (b"", b"Connection: close\r\n"):
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n" + end + b"\r\n")
            await asyncio.sleep(0.2)  # the body comes after what a head may take
            writer.write(b"x")
        assert (await asyncio.wait_for(reader.read(), 10)).count(b"hello") == 2
