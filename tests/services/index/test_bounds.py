"""What grows with nothing but the pool, and what Redis keeps for how long."""

from __future__ import annotations

import asyncio

from kvern.services.runtime.redis_index import open_redis
from tests.services.index.indexed_pool import IndexedPool, new_reader, settled
from tests.services.index.redis_servers import RedisServer


async def test_a_million_unique_prefixes_stay_bounded(server: RedisServer) -> None:
    """F18: what Redis and the writer hold is bounded by the pool."""
    num_blocks = 500
    redis = open_redis(server.url)
    async with IndexedPool(redis, num_blocks=num_blocks) as replica:
        await settled(new_reader(redis), [bytes(16)], replica)
        for number in range(1_000_000):
            digest = number.to_bytes(16)[::-1]
            block = replica.pool.allocate(1)
            replica.pool.register(block[0], digest, None)
            replica.pool.release(block)
            if number % 5000 == 0:
                replica.publish()
                assert len(replica.writer._pending or ()) <= 2 * num_blocks
                await asyncio.sleep(0)
        replica.publish()
        await settled(new_reader(redis), [digest], replica)
        assert await redis.scard(replica.keys.blocks) == num_blocks
    await redis.aclose()
