"""Which pools and replicas there are."""

from __future__ import annotations

import json
from typing import NamedTuple

from kvern.services.runtime.redis_index.connection import RedisClient
from kvern.services.runtime.redis_index.keys import POOLS_KEY, Shard
from kvern.services.runtime.redis_index.registry import RegistryEntry, epoch_text


class Listing(NamedTuple):
    alive: list[RegistryEntry]
    dead: list[RegistryEntry]
    """Registered without a lease: gone, or cut off from Redis."""


async def list_pools(redis: RedisClient) -> dict[str, int]:
    """Return the number of shards of each pool, by pool id."""
    pools = await redis.execute_command("HGETALL", POOLS_KEY)
    return {pool.decode(): json.loads(text)["num_shards"] for pool, text in pools.items()}


async def list_replicas(redis: RedisClient, shard: Shard) -> Listing:
    """Return who is registered in a shard."""
    fields = await redis.execute_command("HVALS", shard.registry)
    listing = Listing([], [])
    entries = [entry for field in fields if (entry := _read(field)) is not None]
    if not entries:
        return listing
    leases = await redis.execute_command("MGET", *(shard.lease(entry.replica) for entry in entries))
    for entry, lease in zip(entries, leases, strict=True):
        is_alive = lease == epoch_text(entry.epoch).encode()
        (listing.alive if is_alive else listing.dead).append(entry)
    return listing


def _read(field: bytes) -> RegistryEntry | None:
    try:
        return RegistryEntry.from_json(field)
    except ValueError:
        # A version to come may write what this one cannot read. Its replicas are then other routers' to serve.
        return None
