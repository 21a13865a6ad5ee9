"""What a gRPC server counts of its calls, however they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from kvern.services.runtime import errors
from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.interceptors import code_of_cancelled
from kvern.services.runtime.server import GrpcServer
from kvern.services.runtime.settings import ServiceSettings
from kvern.services.runtime.status import Status
from kvern.v1 import engine_pb2_grpc, replica_pb2, replica_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

from .test_interceptors import KINDS, TIMEOUT_S, Peer, do_nothing, failing_with, failure, unary

METHODS = {
    "unary": "kvern.v1.TokenizerService/GetTokenizerInfo",
    "streamed": "kvern.v1.ReplicaService/Serve",
    "both_ways": "kvern.v1.EngineService/Connect",
}

Kind = Callable[[grpc.aio.Channel], Awaitable[None]]


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def status() -> Status:
    return Status("test")


@pytest_asyncio.fixture
async def channel(peer: Peer, status: Status, tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    settings = ServiceSettings(listen=(f"unix:{tmp_path}/s.sock",), drain_delay_s=0, drain_timeout_s=0)
    async with open_channel(settings.listen[0]) as channel, GrpcServer(settings, [], status) as server:
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(peer, server.grpc)
        replica_pb2_grpc.add_ReplicaServiceServicer_to_server(peer, server.grpc)
        engine_pb2_grpc.add_EngineServiceServicer_to_server(peer, server.grpc)
        await server.start()
        yield channel


def ends(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Return how many calls ended, by method and code."""
    return {
        (sample.labels["method"], sample.labels["code"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "kvern_rpc_requests_total"
    }


async def some_end(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Wait until a call has ended, and return what `ends` does."""
    async with asyncio.timeout(TIMEOUT_S):
        while not ends(registry):  # noqa: ASYNC110
            await asyncio.sleep(0)
    return ends(registry)


async def end_of_one(registry: CollectorRegistry) -> tuple[str, str]:
    """Wait until one call has ended, and return its method and code. All others would be too many."""
    [(end, times)] = (await some_end(registry)).items()
    assert times == 1
    assert registry.get_sample_value("kvern_rpc_duration_seconds_count", {"method": end[0]}) == 1
    return end


@KINDS
async def test_error_is_counted_by_its_code(channel: grpc.aio.Channel, peer: Peer, status: Status, call: Kind) -> None:
    peer.behave = failing_with(errors.ResourceExhausted("full", retry_after_s=1))
    assert (await failure(call(channel))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await end_of_one(status.registry) == (METHODS[call.__name__], "RESOURCE_EXHAUSTED")


async def test_answered_call_is_ok(channel: grpc.aio.Channel, peer: Peer, status: Status) -> None:
    peer.behave = do_nothing
    await unary(channel)
    assert await end_of_one(status.registry) == (METHODS["unary"], "OK")


async def test_cancelled_stream_reaches_its_handler_and_is_counted_as_cancelled(
    channel: grpc.aio.Channel, peer: Peer, status: Status
) -> None:
    """H10: what counts calls swallows nothing."""
    call = replica_pb2_grpc.ReplicaServiceStub(channel).Serve(replica_pb2.ServeRequest(), timeout=TIMEOUT_S)
    await call.read()
    await peer.entered.wait()
    call.cancel()
    async with asyncio.timeout(TIMEOUT_S):
        await peer.ended.wait()
    assert await end_of_one(status.registry) == (METHODS["streamed"], "CANCELLED")


async def test_deadline_that_passes_is_not_taken_for_a_client_that_left(
    channel: grpc.aio.Channel, peer: Peer, status: Status
) -> None:
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    timeout_s = 0.1
    while not peer.entered.is_set():  # a deadline that passes on the way there is not what is asked for
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.GetTokenizerInfo(tokenizer_pb2.GetTokenizerInfoRequest(), timeout=timeout_s)
        timeout_s *= 2
    assert (await some_end(status.registry)).keys() == {(METHODS["unary"], "DEADLINE_EXCEEDED")}


@pytest.mark.parametrize(
    ("remaining_s", "elapsed_s", "code"),
    [
        (None, 5.0, grpc.StatusCode.CANCELLED),
        (5.0, 5.0, grpc.StatusCode.CANCELLED),
        (0.0, 5.0, grpc.StatusCode.DEADLINE_EXCEEDED),
        (0.9, 100.0, grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_deadline_has_passed_when_all_but_what_grpc_rounds_is_gone(
    remaining_s: float | None, elapsed_s: float, code: grpc.StatusCode
) -> None:
    assert code_of_cancelled(remaining_s, elapsed_s) is code


async def test_methods_that_do_not_exist_share_one_series(channel: grpc.aio.Channel, status: Status) -> None:
    """H08."""
    for number in range(50):
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(f"/kvern.v1.Made/Up{number}")(b"")
    assert ends(status.registry) == {("other", "UNIMPLEMENTED"): 50}


async def test_health_service_counts_too(channel: grpc.aio.Channel, status: Status) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Check(health_pb2.HealthCheckRequest(service="unheard-of"))
    assert await end_of_one(status.registry) == ("grpc.health.v1.Health/Check", "NOT_FOUND")
