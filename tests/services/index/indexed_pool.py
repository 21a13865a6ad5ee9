"""A replica as the index sees it: a real block pool whose events a real writer sends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

from prometheus_client import CollectorRegistry

from kvern.engine.block_hash import extend_digests, root_digest
from kvern.engine.block_pool import BlockPool
from kvern.services.engine.index_delta import Delta, Position
from kvern.services.engine.index_writer import IndexWriter
from kvern.services.engine.replica_index import ReplicaIndex
from kvern.services.router.index_reader import IndexReader
from kvern.services.router.metrics import IndexMetrics
from kvern.services.runtime.redis_index import RedisClient, RegistryEntry, ReplicaState
from kvern.services.runtime.redis_index.keys import ReplicaKeys, home_shard

MODEL = "small"
CONTRACT = "weights {of} one kind"
BLOCK_SIZE = 4
BUDGET_S = 60.0
SETTLE_TIMEOUT_S = 60.0


def prompt_digests(token_ids: Sequence[int], salt: str = "", block_size: int = BLOCK_SIZE) -> list[bytes]:
    return extend_digests(root_digest(CONTRACT, salt), token_ids, block_size)


def new_reader(redis: RedisClient, registry: CollectorRegistry | None = None) -> IndexReader:
    """Return a router's view of the index. registry: where its lookups are counted."""
    return IndexReader(redis, IndexMetrics(registry or CollectorRegistry()))


class IndexedPool:
    """One start of one replica. As a context manager its writer runs."""

    def __init__(
        self,
        redis: RedisClient,
        replica: str = "replica-0:50051",
        epoch: int = 1 << 56,
        num_blocks: int = 32,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.replica, self.epoch, self.block_size = replica, epoch, block_size
        self.state: ReplicaState = "ready"
        self.pool = BlockPool(num_blocks, record_events=True)
        self.writer = IndexWriter(redis, self.entry, self._snapshot)
        self._task: asyncio.Task[None] | None = None

    def entry(self) -> RegistryEntry:
        return RegistryEntry(
            replica=self.replica,
            address=f"unix:/run/{self.replica}",
            epoch=self.epoch,
            model=MODEL,
            contract=CONTRACT,
            block_size=self.block_size,
            num_blocks=self.pool.num_blocks,
            max_model_len=4096,
            state=self.state,
        )

    @property
    def keys(self) -> ReplicaKeys:
        return ReplicaKeys.of(home_shard(self.entry(), 1), self.replica, self.epoch)

    async def _snapshot(self) -> list[bytes]:
        self.publish()
        return self.pool.resident_digests

    def publish(self) -> None:
        self.writer.record(self.pool.take_events())

    def serve(self, digests: Sequence[bytes]) -> None:
        """Compute a prompt as a request does, which evicts what is oldest, and keep it cached."""
        self.pool.release(self.hold(digests))
        self.publish()

    def hold(self, digests: Sequence[bytes], *, is_computed_anew: bool = False) -> list[int]:
        """Compute a prompt and keep its blocks referenced. is_computed_anew: as by a twin at the same time."""
        found = [] if is_computed_anew else self.pool.find_prefix(digests)
        self.pool.share(found)
        table = found + self.pool.allocate(len(digests) - len(found))
        parents = [None, *digests]
        for number in range(len(found), len(digests)):
            table[number] = self.pool.register(table[number], digests[number], parents[number])
        self.publish()
        return table

    def matched(self, digests: Sequence[bytes]) -> int:
        return len(self.pool.find_prefix(digests))

    async def exact(self) -> None:
        """Wait until a heartbeat has found that the index is what was sent."""
        await eventually(lambda: self.writer.num_matches)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.writer.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def ended(self) -> None:
        """Wait for what `run` raises."""
        assert self._task is not None
        await asyncio.wait_for(self._task, SETTLE_TIMEOUT_S)

    async def die(self) -> None:
        """End without a word to Redis, as a killed process does."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._task


class LossyIndex(ReplicaIndex):
    """Loses as many updates as it is told to, and says that they arrived."""

    num_to_lose = 0

    async def apply(
        self, keys: ReplicaKeys, entry: RegistryEntry, delta: Delta, before: Position, after: Position
    ) -> bool:
        if self.num_to_lose:
            self.num_to_lose -= 1
            return True
        return await super().apply(keys, entry, delta, before, after)


async def matches(reader: IndexReader, digests: Sequence[bytes]) -> dict[str, int]:
    """Ask the index as it is now."""
    await reader.refresh()
    return await reader.match(MODEL, CONTRACT, b"".join(digests), BUDGET_S)


async def settled(reader: IndexReader, digests: Sequence[bytes], *replicas: IndexedPool) -> None:
    """Wait until the index says of each replica what its pool says."""

    async def agrees() -> bool:
        found = await matches(reader, digests)
        return all(found.get(each.replica) == each.matched(digests) for each in replicas)

    await eventually(agrees)


async def eventually(condition: Callable[[], object]) -> None:
    """Wait for a condition, plain or awaitable."""
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        assert time.monotonic() < deadline_s, "this did not come to pass"
        await asyncio.sleep(0.01)
