"""Random events of real block pools, random damage: the index still comes to say exactly what the pools say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvern.services.runtime.redis_index import RedisClient, open_redis
from tests.services.index.indexed_pool import IndexedPool, LossyIndex, new_reader, prompt_digests, settled

# Prompts that share beginnings of every length.
PROMPTS = [prompt_digests([*range(4 * shared), *range(100 * shared, 100 * shared + 40)]) for shared in range(10)]
NUM_REPLICAS = 3

serve = st.tuples(st.just("serve"), st.sampled_from(range(10)), st.integers(1, 20))
damage = st.tuples(st.sampled_from(["reset", "restart", "lose", "flush", "pop", "pause"]))
steps = st.lists(st.tuples(st.integers(0, NUM_REPLICAS - 1), serve | serve | damage), max_size=40)


@given(steps=steps)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_index_after_random_events_and_damage_is_exact(redis_url: str, steps: Sequence[tuple[int, tuple]]) -> None:
    asyncio.run(_play(redis_url, steps))


async def _play(redis_url: str, steps: Sequence[tuple[int, tuple]]) -> None:
    redis = open_redis(redis_url)
    try:
        await redis.flushall()
        fleet = Fleet(redis)
        async with fleet.stack:
            await fleet.start()
            for number, step in steps:
                await fleet.take(number, *step)
            reader = new_reader(redis)
            for prompt in PROMPTS:
                await settled(reader, prompt, *fleet.replicas)
    finally:
        await redis.aclose()


class Fleet:
    def __init__(self, redis: RedisClient) -> None:
        self.redis = redis
        self.stack = AsyncExitStack()
        self.replicas = [IndexedPool(redis, f"replica-{number}") for number in range(NUM_REPLICAS)]

    async def start(self) -> None:
        for replica in self.replicas:
            await self._run(replica)

    async def _run(self, replica: IndexedPool) -> None:
        replica.writer._index = LossyIndex(self.redis)
        await self.stack.enter_async_context(replica)

    async def take(self, number: int, step: str, *arguments: int) -> None:
        replica = self.replicas[number]
        match step:
            case "serve":
                prompt, length = arguments
                replica.serve(PROMPTS[prompt][:length])
            case "reset":
                replica.pool.reset()
                replica.publish()
            case "restart":
                self.replicas[number] = IndexedPool(self.redis, replica.replica, replica.epoch + 1)
                await replica.die()
                await self._run(self.replicas[number])
            case "lose":
                replica.writer._index.num_to_lose += 1
            case "flush":
                await self.redis.flushall()
            case "pop":
                await self.redis.execute_command("SPOP", replica.keys.blocks, 2)
            case "pause":
                await asyncio.sleep(0.04)
