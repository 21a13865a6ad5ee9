"""Index and registry while a Redis is slow, frozen, restarted, demoted or failed over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.asyncio.sentinel import SentinelConnectionPool

from kvern.services.router.index_reader import MAX_FAILURES, IndexReader
from kvern.services.runtime.redis_index import RedisClient, RegistryEntry, open_redis
from tests.services.index.indexed_pool import (
    CONTRACT,
    MODEL,
    IndexedPool,
    eventually,
    new_reader,
    prompt_digests,
    settled,
)
from tests.services.index.proxy import proxied
from tests.services.index.redis_servers import RedisServer, free_port, wait_for

PROMPT = prompt_digests(range(40))
OTHER = prompt_digests(range(100, 140))


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[RedisClient]:
    redis = open_redis(url)
    try:
        yield redis
    finally:
        await redis.aclose()
        for sentinel in _sentinels(redis):
            await sentinel.aclose()


def _sentinels(redis: RedisClient) -> list[Redis]:
    """redis-py leaves the clients open that it asks for the primary."""
    pool = getattr(redis, "connection_pool", None)
    return pool.sentinel_manager.sentinels if isinstance(pool, SentinelConnectionPool) else []


def lookups(registry: CollectorRegistry, result: str) -> float:
    return registry.get_sample_value("kvern_router_index_lookups_total", {"result": result}) or 0.0


async def ask(reader: IndexReader, digests: list[bytes], budget_s: float) -> dict[str, int]:
    return await reader.match(MODEL, CONTRACT, b"".join(digests), budget_s)


async def test_reply_of_a_cut_off_lookup_meets_no_other_caller(server: RedisServer) -> None:
    """F14: redis-py once left the reply on the connection."""
    async with proxied(server.port) as proxy, connected(proxy.url) as redis, IndexedPool(redis) as replica:
        reader = new_reader(redis, registry := CollectorRegistry())
        replica.serve(PROMPT)
        replica.serve(OTHER[:3])
        await settled(reader, PROMPT, replica)
        await settled(reader, OTHER, replica)
        proxy.delay_s = 0.1
        assert await ask(reader, PROMPT, 0.03) == {}
        assert lookups(registry, "timeout") == 1
        assert await ask(reader, OTHER, 60) == {replica.replica: 3}


async def test_cancelled_lookup_leaves_no_reply_behind(server: RedisServer) -> None:
    """F14."""
    async with proxied(server.port) as proxy, connected(proxy.url) as redis, IndexedPool(redis) as replica:
        reader = new_reader(redis)
        replica.serve(PROMPT)
        await settled(reader, PROMPT, replica)
        proxy.delay_s = 0.1
        for _ in range(3):
            asking = asyncio.create_task(ask(reader, PROMPT, 5))
            await asyncio.sleep(0.03)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        assert await ask(reader, OTHER, 60) == {replica.replica: 0}


async def test_frozen_redis_costs_a_lookup_its_budget_and_then_nothing(server: RedisServer) -> None:
    async with connected(server.url) as redis, IndexedPool(redis) as replica:
        reader = new_reader(redis, registry := CollectorRegistry())
        replica.serve(PROMPT)
        await settled(reader, PROMPT, replica)
        server.freeze()
        try:
            for _ in range(MAX_FAILURES):
                assert await ask(reader, PROMPT, 0.005) == {}
            assert await asyncio.wait_for(ask(reader, PROMPT, 3600), 60) == {}
            assert lookups(registry, "timeout") == MAX_FAILURES
        finally:
            server.thaw()
        await settled(reader, PROMPT, replica)


async def test_redis_that_comes_back_empty_is_whole_again(server: RedisServer) -> None:
    """Reader and writer keep what they know meanwhile, and say nothing of replicas that nobody saw."""
    async with connected(server.url) as redis, IndexedPool(redis) as replica:
        reader = new_reader(redis, registry := CollectorRegistry())
        replica.serve(PROMPT)
        await settled(reader, PROMPT, replica)
        told: list[dict[str, RegistryEntry]] = []
        server.kill()
        watching = asyncio.create_task(reader.watch(told.append))
        assert await ask(reader, PROMPT, 60) == {}
        assert lookups(registry, "error") > 0
        replica.serve(OTHER)
        assert told == []
        server.start()
        await settled(reader, OTHER, replica)
        await eventually(lambda: told)
        watching.cancel()


async def test_demoted_primary_is_left_for_the_new_one(server: RedisServer, tmp_path: Path) -> None:
    """F15: the service's address leads elsewhere, but the old primary keeps its connections."""
    async with AsyncExitStack() as stack:
        new = stack.enter_context(RedisServer(tmp_path / "new"))
        proxy = await stack.enter_async_context(proxied(server.port))
        redis = await stack.enter_async_context(connected(proxy.url))
        reader_of_new = new_reader(await stack.enter_async_context(connected(new.url)))
        replica = await stack.enter_async_context(IndexedPool(redis))
        replica.serve(PROMPT)
        await settled(new_reader(redis), PROMPT, replica)
        proxy.target_port = new.port
        server.command("REPLICAOF", "127.0.0.1", new.port)
        replica.serve(OTHER)
        await settled(reader_of_new, OTHER, replica)
        await settled(reader_of_new, PROMPT, replica)


@pytest.fixture
def sentinel(server: RedisServer, tmp_path: Path) -> Iterator[RedisServer]:
    """A sentinel that watches a primary with one replica."""
    with RedisServer(tmp_path / "follower", "--replicaof", "127.0.0.1", str(server.port)) as follower:
        wait_for(lambda: follower.command("ROLE")[3] == b"connected")
        settings = tmp_path / "sentinel.conf"
        settings.write_text(
            f"sentinel monitor kvern 127.0.0.1 {server.port} 1\n"
            "sentinel down-after-milliseconds kvern 2000\nsentinel failover-timeout kvern 2000\n"
        )
        with Sentinel(tmp_path / "sentinel", settings) as running:
            # It cannot ask a primary that is gone who follows it.
            wait_for(lambda: len(running.command("SENTINEL", "REPLICAS", "kvern")) == 1)
            yield running


class Sentinel(RedisServer):
    def __init__(self, folder: Path, settings: Path) -> None:
        super().__init__(folder)
        self._command = [self._command[0], str(settings), "--sentinel", "--port", str(self.port)]
        self._command += ["--unixsocket", str(self.socket), "--logfile", str(folder / "log")]


async def test_sentinel_leads_to_the_primary_of_the_moment(server: RedisServer, sentinel: RedisServer) -> None:
    url = f"redis+sentinel://127.0.0.1:{sentinel.port},127.0.0.1:{free_port()}/kvern"
    async with connected(url) as redis, IndexedPool(redis) as replica:
        reader = new_reader(redis)
        replica.serve(PROMPT)
        await settled(reader, PROMPT, replica)
        server.kill()
        replica.serve(OTHER)
        await eventually(lambda: _answers(reader))
        await settled(reader, OTHER, replica)


async def _answers(reader: IndexReader) -> bool:
    try:
        return bool(await reader.refresh())
    except Exception:
        return False
