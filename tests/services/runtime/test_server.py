from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.server import GrpcServer
from kvern.services.runtime.settings import ServiceSettings
from kvern.services.runtime.status import Status
from tests.up_process import PATIENCE_S

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def make_settings(tmp_path: Path) -> ServiceSettings:
    return ServiceSettings(listen=(f"unix:{tmp_path}/server.sock",), drain_delay_s=0, drain_timeout_s=60)


async def test_drain_tells_health_watchers_and_does_not_wait_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(tmp_path)
    is_told = asyncio.Event()
    # The drain's delay lasts until the news has travelled: with the connection closed right behind it, it may be lost.
    monkeypatch.setattr(asyncio, "sleep", lambda delay_s: is_told.wait())

    async def read_news() -> health_pb2.HealthCheckResponse:
        try:
            return await watch.read()
        finally:
            is_told.set()

    async with open_channel(settings.listen[0]) as channel:
        async with GrpcServer(settings, ["kvern.v1.Test"], Status("test")) as server:
            await server.start()
            request = health_pb2.HealthCheckRequest(service="kvern.v1.Test")
            watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=PATIENCE_S)
            assert (await watch.read()).status == NOT_SERVING
            server.set_ready(True)
            assert (await watch.read()).status == SERVING
            news = asyncio.create_task(read_news())
        assert (await news).status == NOT_SERVING
        # How the stream ends depends on which end closes the connection first.
        with suppress(grpc.aio.AioRpcError):
            assert await watch.read() is grpc.aio.EOF


async def test_drain_waits_for_calls_in_flight(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    release = asyncio.Event()

    async def slow(request: bytes, context: object) -> bytes:
        started.set()
        await release.wait()
        return request

    started = asyncio.Event()
    handler = grpc.unary_unary_rpc_method_handler(slow)  # type: ignore[arg-type]
    async with open_channel(settings.listen[0]) as channel:
        async with GrpcServer(settings, [], Status("test")) as server:
            server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Slow": handler}),))
            await server.start()
            call = channel.unary_unary("/test/Slow")(b"x")
            await started.wait()
            asyncio.get_running_loop().call_later(0.2, release.set)
        assert await call == b"x"
