"""Redis freezes, forgets and dies, routers and replicas restart, and routing stays right."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import redis

from kvern.client import AsyncClient, Scheduled
from kvern.engine.block_hash import DIGEST_BYTES, extend_digests, root_digest
from kvern.services.router.index_reader import IndexReader
from kvern.services.runtime.redis_index import open_redis
from kvern.v1 import router_pb2
from tests.services.index.indexed_pool import new_reader
from tests.services.processes import running
from tests.up_process import PATIENCE_S, UpProcess, free_port, wait_until

from .crowd import Crowd
from .fleet import BUDGET, NO_HELP, NUM_REPLICAS, wait_ready

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEASE_S = 5.0


def long_prompt(number: int) -> list[int]:
    """Return token ids that no other test begins with."""
    return [2000 + number, *range(1000, 1100)]


@pytest_asyncio.fixture(loop_scope="module")
async def reader(replicas: UpProcess) -> AsyncIterator[IndexReader]:
    async with open_redis(f"unix://{replicas.sockets}/redis.sock") as client:
        index = new_reader(client)
        watching = asyncio.create_task(index.watch(lambda entries: None))
        yield index
        watching.cancel()


async def ask(client: AsyncClient, prompt: list[int]) -> int:
    """Generate a little. Return how many tokens of the prompt were cached."""
    cached = -1
    async for event in client.generate(prompt, max_tokens=2, temperature=0, timeout_s=PATIENCE_S):
        if isinstance(event, Scheduled):
            cached = event.cached_tokens
    return cached


async def indexed_blocks(client: AsyncClient, reader: IndexReader, prompt: list[int]) -> dict[str, int]:
    """Return what the index holds of a prompt, by replica, where it is something."""
    (model,) = (await client.list_models()).models
    digests = b"".join(extend_digests(root_digest(model.contract), prompt, model.block_size))
    assert len(digests) == len(prompt) // model.block_size * DIGEST_BYTES
    found = await reader.match(model.name, model.contract, digests, budget_s=PATIENCE_S)
    return {replica: count for replica, count in found.items() if count}


async def wait_indexed(client: AsyncClient, reader: IndexReader, prompt: list[int]) -> str:
    """Wait until the index holds all of a prompt's full blocks, and return at which replica."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for replica, count in (await indexed_blocks(client, reader, prompt)).items():
                if count == len(prompt) // 16:
                    return replica
            await asyncio.sleep(0.02)


async def wait_forgotten(client: AsyncClient, reader: IndexReader, prompt: list[int]) -> None:
    """Wait until the index holds nothing of a prompt."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if not await indexed_blocks(client, reader, prompt):
                return
            await asyncio.sleep(0.02)


async def statuses(client: AsyncClient) -> list[router_pb2.ReplicaStatus]:
    return list((await client.list_replicas()).replicas)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_flushed_index_is_whole_again(
    replicas: UpProcess, fleet_client: AsyncClient, reader: IndexReader
) -> None:
    await wait_ready(fleet_client)
    await ask(fleet_client, long_prompt(1))
    holder = await wait_indexed(fleet_client, reader, long_prompt(1))
    with redis.Redis(unix_socket_path=f"{replicas.sockets}/redis.sock") as server:
        server.flushall()
    assert await wait_indexed(fleet_client, reader, long_prompt(1)) == holder
    assert await ask(fleet_client, long_prompt(1)) == 96


async def test_requests_are_served_while_redis_is_frozen_and_no_replica_is_forgotten(
    replicas: UpProcess, fleet_client: AsyncClient, undisturbed: list[str]
) -> None:
    """From the first moment until every lease, were one taken from Redis, would have ended twice."""
    await wait_ready(fleet_client)
    with frozen(replicas.children()["redis"]):
        thawing_at = asyncio.get_running_loop().time() + 2 * LEASE_S
        while True:
            assert await Crowd(fleet_client).run() == undisturbed
            assert sum(each.reachable for each in await statuses(fleet_client)) == NUM_REPLICAS
            if asyncio.get_running_loop().time() > thawing_at:
                break
            await asyncio.sleep(LEASE_S / 4)


async def test_redis_that_comes_back_empty_costs_no_replica_and_is_filled_again(
    replicas: UpProcess, fleet_client: AsyncClient, reader: IndexReader
) -> None:
    await wait_ready(fleet_client)
    await ask(fleet_client, long_prompt(2))
    holder = await wait_indexed(fleet_client, reader, long_prompt(2))
    pid = replicas.children()["redis"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: replicas.children().get("redis", pid) != pid, "a new Redis")
    assert await wait_indexed(fleet_client, reader, long_prompt(2)) == holder
    assert [each.reachable for each in await statuses(fleet_client)] == [True] * NUM_REPLICAS


async def test_router_that_restarts_while_redis_is_frozen_serves(replicas: UpProcess, undisturbed: list[str]) -> None:
    with frozen(replicas.children()["redis"]):
        await asyncio.to_thread(replicas.kill, "router")
        async with AsyncClient(replicas.listen, retry=NO_HELP) as client:
            await wait_ready(client)
            assert await Crowd(client).run() == undisturbed


async def test_replica_that_restarts_under_its_name_is_not_taken_for_what_it_was(
    fleet_client: AsyncClient, replicas: UpProcess, reader: IndexReader
) -> None:
    """F01, F02."""
    await wait_ready(fleet_client)
    await ask(fleet_client, long_prompt(3))
    holder = await wait_indexed(fleet_client, reader, long_prompt(3))
    name = Path(holder).stem.replace("detokenizer", "engine")
    await asyncio.to_thread(replicas.kill, name)
    await wait_ready(fleet_client)
    await wait_forgotten(fleet_client, reader, long_prompt(3))
    route = await fleet_client.route(long_prompt(3))
    assert [each.matched_tokens for each in route.candidates] == [0] * NUM_REPLICAS
    assert await ask(fleet_client, long_prompt(3)) == 0


async def test_second_router_knows_what_the_first_one_brought_about(
    replicas: UpProcess, fleet_client: AsyncClient, reader: IndexReader, undisturbed: list[str], tmp_path: Path
) -> None:
    await wait_ready(fleet_client)
    await ask(fleet_client, long_prompt(4))
    holder = await wait_indexed(fleet_client, reader, long_prompt(4))
    listen = f"127.0.0.1:{free_port()}"
    flags = [
        f"--listen={listen}",
        f"--tokenizer=unix:{replicas.sockets}/tokenizer.sock",
        f"--redis=unix://{replicas.sockets}/redis.sock",
        BUDGET,
    ]
    async with running("router", *flags, log=tmp_path / "router.log"), AsyncClient(listen) as second:
        await wait_ready(second)
        route = await second.route(long_prompt(4))
        assert (route.replica, route.matched_tokens) == (holder, 96)
        both = await asyncio.gather(Crowd(fleet_client).run(), Crowd(second).run())
    assert both == [undisturbed, undisturbed]


async def test_text_of_a_stream_is_whole_whichever_router_dies(
    replicas: UpProcess, tmp_path: Path, undisturbed: list[str]
) -> None:
    """The Python client goes on at a router that lives."""
    first, second = (f"127.0.0.1:{free_port()}" for _ in range(2))
    flags = [f"--tokenizer=unix:{replicas.sockets}/tokenizer.sock", f"--redis=unix://{replicas.sockets}/redis.sock"]
    async with (
        running("router", f"--listen={first}", *flags, log=tmp_path / "1.log") as dying,
        running("router", f"--listen={second}", *flags, log=tmp_path / "2.log"),
        AsyncClient(f"ipv4:{first},{second}") as client,
    ):
        for address in (first, second):
            async with AsyncClient(address) as each:
                await wait_ready(each)
        crowd = Crowd(client)
        texts = asyncio.create_task(crowd.run())
        await crowd.under_way.wait()
        dying.kill()
        assert await texts == undisturbed
