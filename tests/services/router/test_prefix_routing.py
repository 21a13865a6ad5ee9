"""A router process that asks an index on a real Redis. Replicas do what a test says, and one of them is indexed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc

from kvern.engine.block_hash import DIGEST_BYTES
from kvern.services.engine.index_writer import IndexWriter
from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.redis_index import RegistryEntry, open_redis
from kvern.v1 import inference_pb2, inference_pb2_grpc, replica_pb2, tokenizer_pb2
from tests.services.index.redis_servers import RedisServer
from tests.services.processes import running
from tests.services.scraping import scrape, scrape_until, status_address

from . import scripted
from .scripted import CONTEXT, MODEL, ScriptedReplica, ScriptedTokenizer
from .test_metrics import OF_REDIS, WITHOUT_REDIS

NUM_REPLICAS = 3
BLOCK_SIZE = 16
PROMPT = "a prompt that one replica has seen before, twice over as it were"
MATCHED = 4 * BLOCK_SIZE
"""The whole prompt. Its last token is computed all the same, if nothing follows."""
BUDGET = ("--index-budget-ms", "30000")
"""Enough on any machine, so that a test fails only for a reason."""


@asynccontextmanager
async def indexed(redis: RedisServer, replica: ScriptedReplica) -> AsyncIterator[None]:
    """Write to the index that a replica holds the blocks of PROMPT."""
    hashing = tokenizer_pb2.BlockHashing(contract="c", block_size=BLOCK_SIZE)
    joined = scripted.digests_of(list(PROMPT.encode()), hashing)
    digests = [joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES)]
    entry = RegistryEntry(
        replica="holder",
        address=replica.address,
        epoch=1,
        model=MODEL,
        contract="c",
        block_size=BLOCK_SIZE,
        num_blocks=100,
        max_model_len=CONTEXT,
        state="ready",
    )

    async def snapshot() -> list[bytes]:
        return digests

    client = open_redis(f"unix://{redis.socket}")
    writer = IndexWriter(client, lambda: entry, snapshot)
    task = asyncio.create_task(writer.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        await client.aclose()


@asynccontextmanager
async def routing(
    tmp_path: Path, redis: RedisServer, *flags: str, status: str = ""
) -> AsyncIterator[tuple[inference_pb2_grpc.InferenceServiceAsyncStub, list[ScriptedReplica]]]:
    """Yield a router over three replicas, the second of which is indexed. It tells its metrics at `status`."""
    tokenizer = ScriptedTokenizer(f"unix:{tmp_path}/tokenizer.sock")
    replicas = [ScriptedReplica(f"unix:{tmp_path}/replica-{number}.sock") for number in range(NUM_REPLICAS)]
    address = f"unix:{tmp_path}/router.sock"
    peers = ["--tokenizer", tokenizer.address, "--replicas", ",".join(each.address for each in replicas)]
    peers += ["--redis", f"unix://{redis.socket}", "--status-listen", status or status_address()]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(scripted.serving(tokenizer, *replicas))
        await stack.enter_async_context(indexed(redis, replicas[1]))
        log = tmp_path / "log"
        await stack.enter_async_context(running("router", "--listen", address, *peers, *flags, log=log))
        channel = await stack.enter_async_context(open_channel(address))
        await channel.channel_ready()
        yield inference_pb2_grpc.InferenceServiceStub(channel), replicas


async def route(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub, request: inference_pb2.GenerateRequest, matched: int
) -> inference_pb2.RouteResponse:
    """Ask until the router knows all replicas and counts on `matched` tokens: it hears of them as they register."""
    async with asyncio.timeout(60):
        while True:
            with suppress(grpc.aio.AioRpcError):
                response = await stub.Route(inference_pb2.RouteRequest(request=request))
                if (len(response.candidates), response.matched_tokens) == (NUM_REPLICAS, matched):
                    return response
            await asyncio.sleep(0.02)


async def test_prompt_goes_where_its_blocks_are_as_long_as_it_may_reuse_them(tmp_path: Path) -> None:
    request = inference_pb2.GenerateRequest(text=PROMPT + "!")
    with RedisServer(tmp_path / "redis") as redis:
        async with routing(tmp_path, redis, *BUDGET) as (stub, replicas):
            routed = await route(stub, request, MATCHED)
            assert (routed.replica, routed.address) == ("holder", replicas[1].address)
            assert [each.matched_tokens for each in routed.candidates] == [MATCHED, 0, 0]
            for _ in range(3):
                call = stub.Generate(request)
                assert [event async for event in call]
                told = dict(await call.trailing_metadata())
                assert (told["kvern-replica"], told["kvern-matched-tokens"]) == (replicas[1].address, str(MATCHED))
            assert [len(each.received) for each in replicas] == [0, 3, 0]
            for cache in (inference_pb2.Cache(bypass=True), inference_pb2.Cache(salt="another tenant")):
                await route(stub, inference_pb2.GenerateRequest(text=PROMPT, cache=cache), 0)


async def test_requests_are_served_when_the_index_is_gone_and_metrics_tell(tmp_path: Path) -> None:
    request, status = inference_pb2.GenerateRequest(text=PROMPT), status_address()
    with RedisServer(tmp_path / "redis") as redis:
        async with routing(tmp_path, redis, *BUDGET, status=status) as (stub, replicas):
            await route(stub, request, MATCHED - 1)
            before = await scrape(status)
            before.assert_has(WITHOUT_REDIS | OF_REDIS)
            assert before("kvern_router_redis_up") == 1
            assert before("kvern_router_index_lookups_total", result="ok") >= 1
            redis.kill()
            for _ in range(5):
                assert [event async for event in stub.Generate(request)]
            assert sum(len(each.received) for each in replicas) == 5
            after = await scrape_until(status, lambda now: now("kvern_router_redis_up") == 0)
            assert after("kvern_router_index_lookups_total", result="error") >= 1
            lookups = after("kvern_router_index_lookups_total")
            assert after("kvern_router_index_lookup_seconds_count") == lookups
            younger = after("kvern_router_registry_age_seconds")
            assert (await scrape(status))("kvern_router_registry_age_seconds") > younger


async def test_expected_cached_tokens_are_compared_with_what_the_replica_says(tmp_path: Path) -> None:
    status = status_address()

    async def say(request: inference_pb2.GenerateRequest) -> AsyncIterator[replica_pb2.ServeResponse]:
        yield scripted.started(request)
        yield scripted.scheduled(MATCHED - 1 if request.session_id == "exact" else 16)

    with RedisServer(tmp_path / "redis") as redis:
        async with routing(tmp_path, redis, *BUDGET, status=status) as (stub, replicas):
            await route(stub, inference_pb2.GenerateRequest(text=PROMPT), MATCHED - 1)
            for replica in replicas:
                replica.behaviour = say
            bypass = inference_pb2.Cache(bypass=True)
            for request in (
                inference_pb2.GenerateRequest(text=PROMPT, session_id="exact"),
                inference_pb2.GenerateRequest(text=PROMPT),
                inference_pb2.GenerateRequest(text="nobody has seen this prompt"),
                inference_pb2.GenerateRequest(text=PROMPT, cache=bypass),
            ):
                assert [event async for event in stub.Generate(request)]
            now = await scrape_until(status, lambda now: now("kvern_router_requests_total") == 4)
    results = [now("kvern_router_predictions_total", result=result) for result in ("exact", "over", "under")]
    assert results == [1, 1, 1]
    assert now("kvern_router_predicted_cached_tokens_total") == 2 * (MATCHED - 1)
    assert now("kvern_router_prediction_error_tokens_sum") == MATCHED - 1 - 16 + 16
    assert now("kvern_router_cached_tokens_total") == MATCHED - 1 + 3 * 16


async def test_other_policy_is_followed_and_told(tmp_path: Path) -> None:
    request = inference_pb2.GenerateRequest(text=PROMPT)
    with RedisServer(tmp_path / "redis") as redis:
        async with routing(tmp_path, redis, "--routing-policy", "round-robin") as (stub, replicas):
            await route(stub, request, 0)
            for _ in range(6):
                call = stub.Generate(request)
                assert [event async for event in call]
                assert dict(await call.trailing_metadata())["kvern-policy"] == "round-robin"
            assert [len(each.received) for each in replicas] == [2, 2, 2]
