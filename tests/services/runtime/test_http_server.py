"""Clients that take their time to say what they want, or to read what they are told."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvern.services.runtime import http_server
from kvern.services.runtime.http_server import bind, serving
from tests.up_process import PATIENCE_S

HELLO = PlainTextResponse("hello")
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def connected(
    sent: bytes, app: ASGIApp = HELLO
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Serve a client that has connected and sent something before anybody accepts it."""
    with bind("127.0.0.1:0") as listener, socket.create_connection(listener.getsockname()) as client:
        client.sendall(sent)
        async with serving(app, [listener], grace_s=1):
            reader, writer = await asyncio.open_connection(sock=client)
            try:
                yield reader, writer
            finally:
                writer.close()


@pytest.mark.parametrize("sent", [b"", HEAD[:-2], HEAD + HEAD[:5]])
async def test_connection_whose_head_does_not_come_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_HEAD_S", 0.1)
    # What ends a connection whose client is late with its next request.
    monkeypatch.setattr(uvicorn, "Config", partial(uvicorn.Config, timeout_keep_alive=0.1))
    async with connected(sent) as (reader, _):
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    assert answer.count(b"hello") == (1 if sent.startswith(HEAD) else 0)


async def test_request_may_take_longer_than_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_HEAD_S", 0.1)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n"
    async with connected(head + b"\r\n") as (reader, writer):
        for rest in (b"x" + head + b"Connection: close\r\n\r\n", b"x"):
            await asyncio.sleep(0.2)  # the body comes after what a head may take
            writer.write(rest)
        assert (await asyncio.wait_for(reader.read(), PATIENCE_S)).count(b"hello") == 2


async def test_connection_whose_body_does_not_come_after_the_answer_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_HEAD_S", 0.1)
    async with connected(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n") as (reader, writer):
        await asyncio.wait_for(reader.readuntil(b"hello"), PATIENCE_S)
        writer.write(b"x")
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""


async def test_client_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_STALLED_S", 0.1)
    is_gone = asyncio.Event()

    async def sends_more_than_sockets_hold(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200})
        for _ in range(512):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        if (await receive())["type"] == "http.disconnect":
            is_gone.set()

    async with connected(HEAD, sends_more_than_sockets_hold):
        await asyncio.wait_for(is_gone.wait(), PATIENCE_S)


async def test_connection_without_requests_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.1)
    async with connected(HEAD) as (reader, _):
        await asyncio.wait_for(reader.readuntil(b"hello"), PATIENCE_S)
        assert await asyncio.wait_for(reader.read(), 4) == b""  # uvicorn itself would keep it for 5 s


def test_connection_is_kept_for_longer_than_by_what_commonly_asks() -> None:
    """Of ingresses, load balancers and client libraries, Go's keep theirs longest, 90 s."""
    assert http_server.KEEP_ALIVE_S > 90


async def test_offer_of_another_protocol_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"
    async with connected(HEAD.removesuffix(b"\r\n") + offer) as (reader, _):
        await asyncio.wait_for(reader.readuntil(b"hello"), PATIENCE_S)
    assert [record.message for record in caplog.records if record.name.startswith("uvicorn")] == []
