"""Two routers' limits over one real Redis, and without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvern.services.router.identity.caller import Caller
from kvern.services.router.identity.policy import TenantPolicy
from kvern.services.router.limits import Kind, TenantLimits, limiter
from kvern.services.router.limits.line import Line
from kvern.services.router.limits.local_counts import LocalCounts
from kvern.services.router.limits.shared_counts import SharedCounts
from kvern.services.router.limits.verdict import Refusal
from kvern.services.runtime.errors import ResourceExhausted
from kvern.services.runtime.redis_index import RedisClient, open_redis
from kvern.services.runtime.redis_index.keys import limit_bucket, limit_leases
from tests.for_ever import for_ever
from tests.services.index.redis_servers import RedisServer

PATIENCE_S = 20.0
ACME = Line("<acme>", Kind.GENERATE)
LEASES = limit_leases(*ACME)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A note that is late is not written, and on a busy machine one may be."""
    monkeypatch.setattr(limiter, "NOTE_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[RedisClient]:
    client = open_redis(server.url)
    await client.flushall()
    yield client
    await client.aclose()


class Router:
    """One router's limits."""

    def __init__(self, redis: RedisClient | None) -> None:
        self.registry = CollectorRegistry()
        shared = None if redis is None else SharedCounts(redis)
        self.limits = TenantLimits(shared, lambda tenant: f"<{tenant}>", PATIENCE_S, self.registry)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[TenantLimits]:
        task = asyncio.create_task(self.limits.watch())
        try:
            yield self.limits
        finally:
            task.cancel()
            await asyncio.wait([task])

    def count(self, name: str) -> float:
        return self.registry.get_sample_value(f"kvern_router_limit_{name}_total") or 0.0


def _caller(tenant: str = "acme", **policy: int) -> Caller:
    return Caller("key:a", tenant, policy=TenantPolicy(**policy))


async def _refusal(limits: TenantLimits, caller: Caller, kind: Kind = Kind.GENERATE) -> ResourceExhausted:
    with pytest.raises(ResourceExhausted) as refused:
        async with limits.admit(caller, kind):
            pass
    return refused.value


async def _written(redis: RedisClient, key: str, field: str, value: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while float(await redis.execute_command("HGET", key, field) or 0) > float(value):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_requests_at_two_routers_count_together(redis: RedisClient) -> None:
    one, other, caller = Router(redis), Router(redis), _caller(max_concurrent=2)
    async with one.running() as first, other.running() as second, AsyncExitStack() as stack:
        for limits in (first, second):
            await stack.enter_async_context(limits.admit(caller, Kind.GENERATE))
        for limits in (first, second):
            refused = await _refusal(limits, caller)
            assert (refused.reason, refused.retry_after_s) == ("TENANT_CONCURRENCY", 1.0)
        async with first.admit(_caller("other", max_concurrent=2), Kind.GENERATE):
            pass  # whatever acme does
        await stack.aclose()
        async with asyncio.timeout(PATIENCE_S):
            while await redis.execute_command("ZCARD", LEASES):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with second.admit(caller, Kind.GENERATE), second.admit(caller, Kind.GENERATE):
            pass
    assert (one.count("fallbacks"), other.count("fallbacks")) == (0, 0)


@pytest.mark.parametrize("has_redis", [True, False])
async def test_requests_of_another_kind_count_apart(redis: RedisClient, has_redis: bool) -> None:
    """A gateway tokenizes for a request that generates."""
    limits, caller = Router(redis if has_redis else None).limits, _caller(max_concurrent=1)
    async with limits.admit(caller, Kind.GENERATE), limits.admit(caller, Kind.OTHER):
        for kind in Kind:
            assert (await _refusal(limits, caller, kind)).reason == "TENANT_CONCURRENCY"


async def test_request_that_has_ended_is_not_counted_against_its_tenants_next_one(redis: RedisClient) -> None:
    """Not even where its end has not been written so far."""
    limits = Router(redis).limits
    for _ in range(3):
        async with limits.admit(_caller(max_concurrent=1), Kind.GENERATE):
            pass
    assert limits._notes.qsize() == 3
    task = asyncio.create_task(limits.watch())
    async with asyncio.timeout(PATIENCE_S):
        while limits._ended:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])


async def test_tokens_at_two_routers_are_of_one_bucket_which_may_go_into_debt(redis: RedisClient) -> None:
    caller = _caller(tokens_per_minute=600)
    async with Router(redis).running() as first, Router(redis).running() as second:
        async with first.admit(caller, Kind.GENERATE) as usage:
            usage.charge(700)
            await _written(redis, limit_bucket("<acme>"), "level", "-50")
            refused = await _refusal(second, caller)
        assert refused.reason == "TENANT_TOKENS"
        assert 5 < refused.retry_after_s <= 10.2  # 100 tokens of debt at 10 a second
        async with first.admit(_caller("other", tokens_per_minute=600), Kind.GENERATE):
            pass
    time_to_live_ms = await redis.execute_command("PTTL", limit_bucket("<acme>"))
    assert 60_000 < time_to_live_ms <= 70_000, "the bucket is kept until it is full again, and no longer"


async def test_requests_of_a_router_that_died_stop_to_count(
    redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = _caller(max_concurrent=1)
    policy = caller.policy
    monkeypatch.setattr("kvern.services.router.limits.shared_counts.LEASE_S", 0.001)
    assert await SharedCounts(redis).begin(ACME, policy, "of the dead") is None
    await asyncio.sleep(0.01)
    async with Router(redis).running() as limits, limits.admit(caller, Kind.GENERATE):
        pass


class LateCounts(SharedCounts):
    """Counts at once and never says so."""

    def __init__(self, redis: RedisClient) -> None:
        super().__init__(redis)
        self.has_counted = asyncio.Event()

    async def begin(self, line: Line, policy: TenantPolicy, request: str, ended: Iterable[str] = ()) -> Refusal | None:
        await super().begin(line, policy, request, ended)
        self.has_counted.set()
        await for_ever()
        return None


async def test_request_that_is_cancelled_while_it_is_being_admitted_stops_to_count(redis: RedisClient) -> None:
    router, counts = Router(redis), LateCounts(redis)
    router.limits._shared = counts
    async with router.running() as limits:
        call = asyncio.create_task(_refusal(limits, _caller(max_concurrent=1)))
        async with asyncio.timeout(PATIENCE_S):
            await counts.has_counted.wait()
            call.cancel()
            while await redis.execute_command("ZCARD", LEASES):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert call.cancelled()


async def test_clock_of_redis_that_was_set_back_keeps_nobody_out(redis: RedisClient) -> None:
    caller = _caller(max_concurrent=1, tokens_per_minute=600_000)
    later_ms = (await redis.time())[0] * 1000 + 3_600_000
    await redis.zadd(LEASES, {"of an earlier time": later_ms})
    await redis.hset(limit_bucket("<acme>"), mapping={"level": "-1", "at_ms": str(later_ms)})
    async with Router(redis).running() as limits:
        assert (await _refusal(limits, caller)).reason == "TENANT_TOKENS"
        async with asyncio.timeout(PATIENCE_S):
            while not await _is_admitted(limits, caller):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def _is_admitted(limits: TenantLimits, caller: Caller) -> bool:
    try:
        async with limits.admit(caller, Kind.GENERATE):
            return True
    except ResourceExhausted:
        return False


async def test_requests_in_flight_are_renewed_and_those_admitted_without_redis_come_to_count(
    redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limiter, "LEASE_S", 0.03)
    caller = _caller(max_concurrent=1)
    async with Router(redis).running() as limits, limits.admit(caller, Kind.GENERATE):
        await redis.flushall()
        async with asyncio.timeout(PATIENCE_S):
            while not await redis.execute_command("ZCARD", LEASES):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await _refusal(Router(redis).limits, caller)).reason == "TENANT_CONCURRENCY"


class SlowToRenew(SharedCounts):
    """Renews what it is given once it may."""

    def __init__(self, redis: RedisClient) -> None:
        super().__init__(redis)
        self.has_begun, self.may_go_on, self.is_done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def renew(self, line: Line, requests: Sequence[str]) -> None:
        self.has_begun.set()
        await self.may_go_on.wait()
        await super().renew(line, requests)
        self.is_done.set()


async def test_request_that_ends_while_it_is_renewed_stops_to_count(
    redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limiter, "LEASE_S", 0.03)
    router, counts = Router(redis), SlowToRenew(redis)
    router.limits._shared = counts
    async with router.running() as limits, asyncio.timeout(PATIENCE_S):
        async with limits.admit(_caller(max_concurrent=1), Kind.GENERATE):
            await counts.has_begun.wait()
        while await redis.execute_command("ZCARD", LEASES):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        counts.may_go_on.set()
        await counts.is_done.wait()
        while await redis.execute_command("ZCARD", LEASES):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_without_redis_each_router_counts_for_itself() -> None:
    router, caller = Router(None), _caller(max_concurrent=1, tokens_per_minute=60)
    async with router.limits.admit(caller, Kind.GENERATE) as usage:
        assert (await _refusal(router.limits, caller)).reason == "TENANT_CONCURRENCY"
        usage.charge(90)
    refused = await _refusal(router.limits, caller)
    assert refused.reason == "TENANT_TOKENS"
    assert 20 < refused.retry_after_s <= 31
    assert router.count("fallbacks") == 0


async def test_redis_gone_or_frozen_falls_back_on_the_routers_own_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a few times requests do not even wait for it."""
    monkeypatch.setattr(limiter, "REST_S", 10 * PATIENCE_S)
    caller = _caller(max_concurrent=1)
    with RedisServer(tmp_path / "redis") as server:
        client = open_redis(server.url)
        router = Router(client)
        async with router.running() as limits:
            async with limits.admit(caller, Kind.GENERATE):
                server.freeze()
                monkeypatch.setattr(limits, "_budget_s", 0.05)
                for _ in range(limiter.MAX_FAILURES):
                    assert (await _refusal(limits, caller)).reason == "TENANT_CONCURRENCY"
                monkeypatch.setattr(limits, "_budget_s", 10 * PATIENCE_S)
                async with asyncio.timeout(PATIENCE_S):
                    assert (await _refusal(limits, caller)).reason == "TENANT_CONCURRENCY"
            async with limits.admit(caller, Kind.GENERATE):
                pass
            assert router.count("fallbacks") == limiter.MAX_FAILURES + 2
            server.kill()
            async with limits.admit(caller, Kind.GENERATE):
                pass
        await client.aclose()


async def test_caller_without_limits_costs_no_call_of_redis() -> None:
    router = Router(open_redis("unix:///nowhere"))
    async with router.limits.admit(_caller(), Kind.GENERATE) as usage:
        usage.charge(10**9)
    async with router.limits.admit(_caller(), Kind.GENERATE):
        pass
    assert router.count("fallbacks") == 0


def test_local_counts_forget_tenants_that_owe_nothing() -> None:
    now, line = 0.0, Line("a", Kind.OTHER)
    counts, policy = LocalCounts(lambda: now), TenantPolicy(max_concurrent=1, tokens_per_minute=60)
    counts.begin(line, policy, "1")
    counts.charge("a", policy, 90)
    counts.prune()
    assert counts.refusal(line, policy) is not None
    counts.end(line, "1")
    counts.prune()
    refusal = counts.refusal(line, policy)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(31)
    now = 91.0
    counts.prune()
    assert list(counts.in_flight()) == []
    assert counts._counts == {}
