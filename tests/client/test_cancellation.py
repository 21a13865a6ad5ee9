"""To leave a generation is to cancel it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

import grpc
import pytest

from kvern.client import AsyncClient, Client, Delta, Finished, KvernError
from tests.up_process import PATIENCE_S

from .conftest import Serve
from .scripted_server import delta, finished, responds, stalls_after, started

STREAM = stalls_after(started(), delta("a", 1))
ANSWER = responds(started(), delta("b", 1), finished())


def _break(client: Client) -> None:
    for event in client.generate("Hi"):
        if isinstance(event, Delta):
            break


def _close(client: Client) -> None:
    events = client.generate("Hi")
    next(events)
    events.close()


def _leave_block(client: Client) -> None:
    with client.generate("Hi") as events:
        next(events)


def _fail(client: Client) -> None:
    with suppress(ZeroDivisionError):
        for _ in client.generate("Hi"):
            raise ZeroDivisionError


@pytest.mark.parametrize("leave", [_break, _close, _leave_block, _fail])
def test_generation_that_is_left_ends_at_the_server_and_the_next_is_served(
    serve: Serve, leave: Callable[[Client], None]
) -> None:
    """E01, E03."""
    server = serve(STREAM, ANSWER)
    with Client(server.address) as client:
        leave(client)
        assert server.ended.wait(PATIENCE_S)
        assert isinstance(list(client.generate("Hi"))[-1], Finished)


async def _break_async(client: AsyncClient) -> None:
    async for event in client.generate("Hi"):
        if isinstance(event, Delta):
            break


async def _close_async(client: AsyncClient) -> None:
    events = client.generate("Hi")
    await anext(events)
    await events.aclose()


async def _leave_block_async(client: AsyncClient) -> None:
    async with client.generate("Hi") as events:
        await anext(events)


async def _cancel_task(client: AsyncClient) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in client.generate("Hi"):
            begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [_break_async, _close_async, _leave_block_async, _cancel_task])
async def test_async_generation_that_is_left_ends_at_the_server_and_the_next_is_served(serve: Serve, leave) -> None:
    """E01, E03."""
    server = serve(STREAM, ANSWER)
    async with AsyncClient(server.address) as client:
        await leave(client)
        assert await asyncio.to_thread(server.ended.wait, PATIENCE_S)
        answer = [event async for event in client.generate("Hi")]
        assert isinstance(answer[-1], Finished)


def test_client_that_is_closed_ends_its_generations_with_an_error(serve: Serve) -> None:
    client = Client(serve(STREAM).address)
    events = client.generate("Hi")
    next(events)
    threading.Timer(0.05, client.close).start()
    with pytest.raises(KvernError) as ended:
        list(events)
    assert ended.value.code is grpc.StatusCode.CANCELLED


async def test_async_client_that_is_closed_ends_its_generations_with_an_error(serve: Serve) -> None:
    """No CancelledError: nobody cancelled the task that reads."""
    client = AsyncClient(serve(STREAM).address)
    events = client.generate("Hi")
    await anext(events)
    closed = asyncio.create_task(client.close())
    with pytest.raises(KvernError) as ended:
        async for _ in events:
            pass
    assert ended.value.code is grpc.StatusCode.CANCELLED
    await closed
