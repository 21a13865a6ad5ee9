"""Asks the index which replica holds how long a prefix, and the registry which replicas there are."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import structlog

from kvern.services.router.metrics import IndexMetrics
from kvern.services.runtime.redis_index import RedisClient, RegistryEntry
from kvern.services.runtime.redis_index.keys import ReplicaKeys, Shard, pool_id
from kvern.services.runtime.redis_index.listing import list_pools, list_replicas
from kvern.services.runtime.redis_index.scripts import LOOKUP, REDIS_ERRORS

REFRESH_S = 1.0
REFRESH_TIMEOUT_S = 2.0
KEEP_S = 60.0
"""How long a replica that left the registry is still asked for: the registry may have been lost, not the replica."""
MAX_FAILURES = 3
"""Lookups that fail one after the other, before requests are spared the wait until the registry answers again."""

_log = structlog.get_logger("kvern.index")


class _Place(NamedTuple):
    """Where a replica's blocks are."""

    shard: Shard
    epoch: int
    seen_s: float


class _ShardView(NamedTuple):
    """What one lookup asks."""

    replicas: list[str]
    keys: list[str]


class IndexReader:
    """The index and registry as one router sees them. It knows the replicas that `watch` or `refresh` has found."""

    def __init__(self, redis: RedisClient, metrics: IndexMetrics) -> None:
        self.is_up = False
        """Whether Redis answered when the registry was last read."""
        self._read_at = time.monotonic()
        self._metrics = metrics
        self._redis = redis
        self._places: dict[str, _Place] = {}
        self._pools: dict[str, list[_ShardView]] = {}
        self._num_failures = 0
        self._is_away = False

    @property
    def registry_age_s(self) -> float:
        """Seconds since the registry was last read, or since the start where it never was."""
        return time.monotonic() - self._read_at

    async def match(self, model: str, contract: str, digests: bytes, budget_s: float) -> dict[str, int]:
        """Return how many of a prompt's first blocks each replica of a model has, by replica id.

        digests: 16 bytes for each block, joined. Replicas that no answer came for within the budget are left out, and
        counted.
        """
        views = self._pools.get(pool_id(model, contract), [])
        if self._num_failures >= MAX_FAILURES or not digests:
            return {}
        # The index keeps the first half of each digest.
        members = memoryview(digests).cast("Q")[::2].tobytes()
        answers = await asyncio.gather(*(self._match(view, members, budget_s) for view in views))
        return {replica: length for answer in answers for replica, length in answer.items()}

    async def _match(self, view: _ShardView, members: bytes, budget_s: float) -> dict[str, int]:
        try:
            # A command cut off here closes its connection, so its reply meets no other caller.
            with self._metrics.duration.time():
                async with asyncio.timeout(budget_s):
                    reply = await LOOKUP.run(self._redis, view.keys, members)
        except TimeoutError:
            self._metrics.timeouts.inc()
            self._num_failures += 1
            return {}
        except REDIS_ERRORS:
            self._metrics.errors.inc()
            self._num_failures += 1
            return {}
        self._metrics.ok.inc()
        self._num_failures = 0
        return dict(zip(view.replicas, map(int, reply.split(b",")), strict=True))

    async def watch(self, on_entries: Callable[[dict[str, RegistryEntry]], None]) -> None:
        """Tell who is registered and alive, by replica id, every second while Redis answers."""
        while True:
            try:
                on_entries(await self.refresh())
                self._is_away = False
            except REDIS_ERRORS as error:
                self.is_up = False
                if not self._is_away:
                    _log.warning("redis does not answer", error=str(error) or type(error).__name__)
                self._is_away = True
            await asyncio.sleep(REFRESH_S)

    async def refresh(self) -> dict[str, RegistryEntry]:
        """Return who is registered and alive, by replica id. Raises one of REDIS_ERRORS."""
        async with asyncio.timeout(REFRESH_TIMEOUT_S):
            found = [(shard, entry) for shard in await self._shards() for entry in await self._alive(shard)]
        self._num_failures = 0
        self.is_up, self._read_at = True, time.monotonic()
        latest: dict[str, RegistryEntry] = {}
        for shard, entry in found:
            if entry.replica not in latest or entry.epoch >= latest[entry.replica].epoch:
                latest[entry.replica] = entry
                self._places[entry.replica] = _Place(shard, entry.epoch, time.monotonic())
        self._build_views()
        return latest

    async def _shards(self) -> list[Shard]:
        pools = await list_pools(self._redis)
        return [Shard(pool, number) for pool, num_shards in pools.items() for number in range(num_shards)]

    async def _alive(self, shard: Shard) -> Iterable[RegistryEntry]:
        return (await list_replicas(self._redis, shard)).alive

    def _build_views(self) -> None:
        now_s = time.monotonic()
        self._places = {replica: place for replica, place in self._places.items() if now_s - place.seen_s < KEEP_S}
        views: dict[Shard, _ShardView] = defaultdict(lambda: _ShardView([], []))
        for replica, place in self._places.items():
            views[place.shard].replicas.append(replica)
            views[place.shard].keys.append(ReplicaKeys.of(place.shard, replica, place.epoch).blocks)
        self._pools = defaultdict(list)
        for shard, view in views.items():
            self._pools[shard.pool].append(view)
