from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvern.client import AsyncClient, Client, Event, RetryPolicy
from kvern.v1 import inference_pb2 as pb

from .proxy import Proxy
from .scripted_server import Behaviour, ScriptedServer

IMPATIENT = RetryPolicy(first_delay_s=0.001, max_delay_s=0.01)
HELLO = pb.GenerateRequest(text="Hi")

Run = Callable[..., list[Event]]
Serve = Callable[..., ScriptedServer]
OnEvent = Callable[[Event], object]


def _run_sync(
    address: str, request: pb.GenerateRequest, on_event: OnEvent, retry: RetryPolicy, **timeouts: Any
) -> None:
    with Client(address, retry=retry) as client:
        for event in client.stream(request, **timeouts):
            on_event(event)


def _run_async(
    address: str, request: pb.GenerateRequest, on_event: OnEvent, retry: RetryPolicy, **timeouts: Any
) -> None:
    async def run() -> None:
        async with AsyncClient(address, retry=retry) as client:
            async for event in client.stream(request, **timeouts):
                on_event(event)

    asyncio.run(run())


@pytest.fixture(params=[_run_sync, _run_async], ids=["sync", "async"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a request to its end, with one client and with the other, and return its events."""

    def run_to_the_end(
        server: ScriptedServer | Proxy,
        generate: pb.GenerateRequest = HELLO,
        on_event: OnEvent = lambda _event: None,
        retry: RetryPolicy = IMPATIENT,
        **timeouts: float,
    ) -> list[Event]:
        events: list[Event] = []

        def take(event: Event) -> None:
            events.append(event)
            on_event(event)

        request.param(server.address, generate, take, retry, **timeouts)
        return events

    return run_to_the_end


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers that stop when the test ends."""
    servers: list[ScriptedServer] = []

    def start(*behaviours: Behaviour, **options: Any) -> ScriptedServer:
        servers.append(ScriptedServer(*behaviours, **options))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
