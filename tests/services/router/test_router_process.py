"""A router process whose peers come and go, and that is told to go itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.services.engine.index_delta import Position
from kvern.services.engine.replica_index import ReplicaIndex
from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.redis_index import RegistryEntry, open_redis
from kvern.services.runtime.redis_index.keys import ReplicaKeys, home_shard
from kvern.v1 import inference_pb2, inference_pb2_grpc, replica_pb2, router_pb2, router_pb2_grpc
from tests.services.index.redis_servers import RedisServer
from tests.services.processes import running
from tests.services.scraping import scrape_until, status_address

from . import scripted
from .setup import Call

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_router_without_tokenizer_setting_exits_naming_it() -> None:
    command = [sys.executable, "-m", "kvern.services.router", "--listen", "unix:/tmp/unused", "--replicas", "unix:/x"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "tokenizer: required" in ended.stderr


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/router.sock"


def _flags(tmp_path: Path, address: str) -> list[str]:
    peers = ["--tokenizer", f"unix:{tmp_path}/tokenizer.sock", "--replicas", f"unix:{tmp_path}/replica.sock"]
    return ["--listen", address, *peers]


async def test_replica_restarted_is_noticed_and_used_again(tmp_path: Path, address: str) -> None:
    replica = scripted.ScriptedReplica(f"unix:{tmp_path}/replica.sock")
    async with (
        scripted.serving(scripted.ScriptedTokenizer(f"unix:{tmp_path}/tokenizer.sock")),
        running("router", *_flags(tmp_path, address), log=tmp_path / "log"),
        open_channel(address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True
        )
        assert (await health.read()).status == NOT_SERVING
        for _ in range(2):
            async with scripted.serving(replica):
                assert (await health.read()).status == SERVING
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                events = [event.WhichOneof("event") async for event in stub.Generate(_request(), timeout=20)]
                assert events == ["started", "delta", "finished"]
            assert (await health.read()).status == NOT_SERVING


async def test_router_told_of_nothing_but_redis_finds_a_replica_that_registers(tmp_path: Path, address: str) -> None:
    """It keeps it when Redis has lost it."""
    replica = scripted.ScriptedReplica(f"unix:{tmp_path}/replica.sock")
    entry = RegistryEntry("r0", replica.address, replica.epoch, scripted.MODEL, "c", 16, 8, scripted.CONTEXT, "ready")
    flags = ["--listen", address, "--tokenizer", f"unix:{tmp_path}/tokenizer.sock"]
    with RedisServer(tmp_path / "redis") as server:
        async with (
            scripted.serving(scripted.ScriptedTokenizer(f"unix:{tmp_path}/tokenizer.sock"), replica),
            running("router", *flags, "--redis", server.url, log=tmp_path / "log"),
            open_channel(address) as channel,
        ):
            redis = open_redis(server.url)
            await channel.channel_ready()  # the lease is short, for a router that has yet to start
            keys = ReplicaKeys.of(home_shard(entry, 1), entry.replica, entry.epoch)
            await ReplicaIndex(redis).join(entry, 1)
            await ReplicaIndex(redis).heartbeat(keys, entry, Position(0, 0, 0))
            await redis.persist(keys.lease)  # the router may take longer to start than a lease lasts
            await _serves(channel)
            await redis.flushall()
            await redis.aclose()
            stub = router_pb2_grpc.RouterServiceStub(channel)
            async with asyncio.timeout(60):
                while True:
                    known = (await stub.ListReplicas(router_pb2.ListReplicasRequest())).replicas
                    if not known[0].registered:
                        break
                    await asyncio.sleep(0.02)
            assert [(each.id, each.reachable) for each in known] == [("r0", True)]
            await _serves(channel)


async def test_router_started_while_redis_is_down_serves_from_its_list(tmp_path: Path, address: str) -> None:
    replica = scripted.ScriptedReplica(f"unix:{tmp_path}/replica.sock")
    async with (
        scripted.serving(scripted.ScriptedTokenizer(f"unix:{tmp_path}/tokenizer.sock"), replica),
        running("router", *_flags(tmp_path, address), "--redis", f"unix://{tmp_path}/none", log=tmp_path / "log"),
        open_channel(address) as channel,
    ):
        await _serves(channel)


async def test_sigterm_mid_stream_lets_it_finish(tmp_path: Path, address: str) -> None:
    """E13."""
    may_finish = asyncio.Event()

    async def behaviour(request: inference_pb2.GenerateRequest) -> AsyncIterator[replica_pb2.ServeResponse]:
        yield scripted.started(request)
        await may_finish.wait()
        yield scripted.delta("whole")

    replica = scripted.ScriptedReplica(f"unix:{tmp_path}/replica.sock", behaviour)
    async with (
        scripted.serving(scripted.ScriptedTokenizer(f"unix:{tmp_path}/tokenizer.sock"), replica),
        running("router", *_flags(tmp_path, address), log=tmp_path / "log") as process,
        open_channel(address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True
        )
        while (await health.read()).status != SERVING:
            pass
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(_request(), timeout=20)
        assert (await call.read()).HasField("started")
        process.terminate()
        assert (await health.read()).status == NOT_SERVING
        health.cancel()
        may_finish.set()
        assert (await call.read()).delta.text == "whole"
        assert await process.wait() == 0


async def test_client_that_stops_reading_is_cut_off_with_a_reason(tmp_path: Path, address: str) -> None:
    """E18: its replica is freed at once, though the router is stuck in a write to it."""
    status = status_address()
    flags = (*_flags(tmp_path, address), "--max-stalled-s", "0.5", "--status-listen", status)
    replica = scripted.ScriptedReplica(f"unix:{tmp_path}/replica.sock", scripted.flood)
    async with (
        scripted.serving(scripted.ScriptedTokenizer(f"unix:{tmp_path}/tokenizer.sock"), replica),
        running("router", *flags, log=tmp_path / "log"),
        open_channel(address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True
        )
        while (await health.read()).status != SERVING:
            pass
        health.cancel()
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(_request(), timeout=20)
        assert (await call.read()).HasField("started")
        async with asyncio.timeout(60):
            await replica.ended.wait()
        with pytest.raises(grpc.aio.AioRpcError, match=r"the reader has held up its call for 0\.5 s") as ended:
            await _read_all(call)
        now = await scrape_until(status, lambda now: now("kvern_router_requests_total") == 1)
    assert now("kvern_router_requests_total", code="RESOURCE_EXHAUSTED") == 1
    assert now("kvern_router_sheds_total", reason="SLOW_READER") == 1
    assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def _serves(channel: grpc.aio.Channel) -> None:
    """Wait until the router says it can, and see that it does."""
    health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True)
    while (await health.read()).status != SERVING:
        pass
    health.cancel()
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    events = [event.WhichOneof("event") async for event in stub.Generate(_request(), timeout=20)]
    assert events == ["started", "delta", "finished"]


async def _read_all(call: Call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def _request() -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text="Hi")
