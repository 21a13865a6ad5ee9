"""What an engine says to the index, command by command."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvern.services.engine.index_delta import Delta, Position
from kvern.services.runtime.redis_index import RedisClient, RegistryEntry
from kvern.services.runtime.redis_index.keys import POOLS_KEY, ReplicaKeys, Shard, pool_id
from kvern.services.runtime.redis_index.listing import Listing, list_replicas
from kvern.services.runtime.redis_index.registry import epoch_text
from kvern.services.runtime.redis_index.scripts import APPLY, COMMIT, FORGET, HEARTBEAT, JOIN, STAGE, Answer, Script

LEASE_S = 5.0
EXPIRY_S = 600
"""How long entries of nobody stay: garbage collection, not liveness."""
STAGING_EXPIRY_S = 60
COMMAND_TIMEOUT_S = 1.0
MIN_FLUSH_INTERVAL_S = 0.03
ROUND_TRIPS_PER_FLUSH = 10
"""A flush a round trip would keep Redis busy with small scripts where it is slow already."""


class StaleEpoch(Exception):
    """A later start of this replica is registered: this process must write no more, and exit."""


class Heartbeat(NamedTuple):
    is_exact: bool
    """Whether the index holds what was sent."""
    epoch_before: int
    """Of whom this heartbeat found registered under the replica's id; its own from the second one on."""
    num_replicas: int
    """Registered in the shard."""


class ReplicaIndex:
    """One replica's part of the index. Every call raises one of REDIS_ERRORS when Redis is away, and all that write
    blocks raise StaleEpoch."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._round_trip_s = 0.0

    @property
    def flush_interval_s(self) -> float:
        return max(MIN_FLUSH_INTERVAL_S, ROUND_TRIPS_PER_FLUSH * self._round_trip_s)

    async def join(self, entry: RegistryEntry, min_shards: int) -> int:
        """Keep the entry's pool listed, and return its number of shards: at least `min_shards` from now on."""
        pool = pool_id(entry.model, entry.contract)
        num_shards = await self._run(JOIN, [POOLS_KEY], pool, entry.model, entry.contract, min_shards, EXPIRY_S)
        return int(num_shards)

    async def heartbeat(self, keys: ReplicaKeys, entry: RegistryEntry, sent: Position) -> Heartbeat:
        """Register, renew the lease, and have the index compared with what was sent."""
        answer, epoch_before, num_replicas = await self._run(
            HEARTBEAT,
            [keys.registry, keys.lease, keys.meta, keys.blocks],
            *_identity(entry),
            entry.to_json(),
            int(LEASE_S * 1000),
            EXPIRY_S,
            *sent,
        )
        return Heartbeat(_accepted(answer), int(epoch_before, 16), num_replicas)

    async def apply(
        self, keys: ReplicaKeys, entry: RegistryEntry, delta: Delta, before: Position, after: Position
    ) -> bool:
        """Change the blocks. Returns whether they were `before`; if not, they need a snapshot."""
        answer = await self._run(
            APPLY,
            [keys.registry, keys.meta, keys.blocks],
            *_identity(entry),
            before.seq,
            *after,
            EXPIRY_S,
            b"".join(delta.adds),
            b"".join(delta.dels),
        )
        return _accepted(answer)

    async def discard_staged(self, keys: ReplicaKeys) -> None:
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            await self._redis.execute_command("UNLINK", keys.staging)

    async def stage(self, keys: ReplicaKeys, members: Sequence[bytes]) -> None:
        """Add to the snapshot that `commit` makes visible."""
        await self._run(STAGE, [keys.staging], STAGING_EXPIRY_S, b"".join(members))

    async def commit(self, keys: ReplicaKeys, entry: RegistryEntry, position: Position) -> bool:
        """Make what is staged the blocks. Returns False if that is not the whole snapshot."""
        keys_used = [keys.registry, keys.meta, keys.blocks, keys.staging]
        return _accepted(await self._run(COMMIT, keys_used, *_identity(entry), *position, EXPIRY_S))

    async def forget(self, shard: Shard, replica: str, epoch: int) -> None:
        """Remove one start of a replica from the index, and from the registry if no later one is there."""
        await self._run(FORGET, ReplicaKeys.of(shard, replica, epoch), replica, epoch_text(epoch))

    async def list_replicas(self, shard: Shard) -> Listing:
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            return await list_replicas(self._redis, shard)

    async def _run(self, script: Script, keys: Sequence[str], *arguments: str | bytes | int) -> Any:
        start_s = time.monotonic()
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            reply = await script.run(self._redis, keys, *arguments)
        self._round_trip_s += (time.monotonic() - start_s - self._round_trip_s) / 8
        return reply


def _identity(entry: RegistryEntry) -> tuple[str, str]:
    return entry.replica, epoch_text(entry.epoch)


def _accepted(answer: bytes) -> bool:
    match Answer(answer.decode()):
        case Answer.OK:
            return True
        case Answer.GAP:
            return False
        case Answer.STALE:
            raise StaleEpoch("a later start of this replica is registered")
