"""Keeps the index true to the blocks of this engine, and the registry to its state."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from enum import StrEnum

import structlog

from kvern.engine.block_pool import CacheEvent
from kvern.services.engine.index_delta import PendingDelta, Position, index_member
from kvern.services.engine.replica_index import ReplicaIndex, StaleEpoch
from kvern.services.runtime.redis_index import RedisClient, RegistryEntry
from kvern.services.runtime.redis_index.keys import MAX_SHARD_REPLICAS, ReplicaKeys, Shard, home_shard
from kvern.services.runtime.redis_index.scripts import REDIS_ERRORS

__all__ = ["IndexWriter", "StaleEpoch"]

HEARTBEAT_S = 1.0
UPKEEP_S = 60.0
"""Between two looks at the pool's shards and at the dead in this one."""
MAX_CHANGES = 1000
"""In one script, while which Redis does nothing else."""
RESYNC_JITTER_S = 0.5
"""All replicas notice at once that Redis came back empty."""
MIN_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
CLOSE_TIMEOUT_S = 1.0

_log = structlog.get_logger("kvern.index")


class ResyncReason(StrEnum):
    """Why the index is sent a snapshot."""

    START = "start"
    SHARD = "shard"
    """It writes to another shard now."""
    MISMATCH = "mismatch"
    """A heartbeat found that the index is not what was sent."""
    GAP = "gap"
    """A delta did not fit."""
    INCOMPLETE = "incomplete"
    """Not all of the snapshot before arrived, or it came too late."""
    ERROR = "error"
    """A command failed, and may or may not have been carried out."""


class IndexWriter:
    """One start of one replica. `run` works until cancelled; Redis may be away, it goes on trying.

    Either the index holds `_position` and `_pending` is what it has not been told (exact), or a snapshot is due. While
    one is asked for, `_overlay` keeps what happens since: some of it is in the snapshot, and the last word counts.
    """

    def __init__(
        self,
        redis: RedisClient,
        entry: Callable[[], RegistryEntry],
        snapshot: Callable[[], Awaitable[list[bytes]]],
    ) -> None:
        """entry: what to say of this replica now; its id and epoch stay the same. snapshot: all resident digests as of
        some moment after the call, such that all events before it have been recorded by the time it is awaited."""
        self.resyncs = dict.fromkeys(ResyncReason, 0)
        """How many snapshots were begun, by why the last one before was not good any more."""
        self.num_matches = 0
        self.num_mismatches = 0
        """How often a heartbeat compared the index with what was sent, and found it the same or not."""
        self.is_up: bool | None = None
        """Whether Redis answered the last heartbeat, or no command failed since. None before the first answer."""
        self._resync_reason = ResyncReason.START
        self._index = ReplicaIndex(redis)
        self._entry = entry
        self._snapshot = snapshot
        self._pending: PendingDelta | None = None
        self._overlay: dict[bytes, bool] | None = None
        self._position = Position(0, 0, 0)
        self._is_exact = False
        self._changed = asyncio.Event()
        self._changed.set()
        self._entry_changed = asyncio.Event()
        # One command at a time, so that a heartbeat's position is that of all commands before it.
        self._turn = asyncio.Lock()
        self._shard: Shard | None = None
        self._left_shards: set[Shard] = set()
        self._num_shards = 1
        self._next_upkeep_s = 0.0
        self._dead: set[tuple[str, int]] = set()

    @property
    def num_resyncs(self) -> int:
        return sum(self.resyncs.values())

    @property
    def num_pending(self) -> int:
        """Changes that the index has not been told."""
        if self._overlay is not None:
            return len(self._overlay)
        return len(self._pending) if self._pending is not None else 0

    def record(self, events: Sequence[CacheEvent]) -> None:
        """Take what happened in the block pool, in order. Call on the event loop's thread."""
        if self._overlay is not None:
            self._overlay.update((index_member(digest), is_added) for digest, is_added, _ in events)
        elif self._pending is not None:
            self._pending.record(events)
            self._changed.set()

    def announce(self) -> None:
        """Write the entry now, not at the next heartbeat: it has changed."""
        self._entry_changed.set()

    async def run(self) -> None:
        """Write until cancelled. Raises StaleEpoch when a later start of this replica has taken over."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_registered())
                tasks.create_task(self._keep_exact())
        except BaseExceptionGroup as group:
            if group.subgroup(StaleEpoch) is None:
                raise
            raise StaleEpoch("a later start of this replica is registered") from group

    async def close(self) -> None:
        """Say draining, then leave index and registry. Call when `run` has ended."""
        with suppress(*REDIS_ERRORS, StaleEpoch):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                entry = self._entry().draining()
                if self._shard is not None:
                    await self._index.heartbeat(self._keys, entry, self._position)
                    await self._index.forget(self._shard, entry.replica, entry.epoch)

    @property
    def _keys(self) -> ReplicaKeys:
        assert self._shard is not None
        entry = self._entry()
        return ReplicaKeys.of(self._shard, entry.replica, entry.epoch)

    async def _keep_registered(self) -> None:
        while True:
            try:
                if self._is_upkeep_due:
                    await self._upkeep()
                async with self._turn:
                    await self._beat()
                self._note_answer()
            except REDIS_ERRORS as error:
                self._note_failure(error)
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._entry_changed.wait()
            self._entry_changed.clear()

    @property
    def _is_upkeep_due(self) -> bool:
        # The pool is another one once the model is loaded and the contract known.
        return time.monotonic() >= self._next_upkeep_s or self._shard != home_shard(self._entry(), self._num_shards)

    async def _upkeep(self) -> None:
        async with self._turn:
            await self._join()
        self._next_upkeep_s = time.monotonic() + UPKEEP_S
        await self._sweep()

    async def _join(self) -> None:
        """Learn the shard to write to. A new one needs a snapshot, and the old one is left after that."""
        entry = self._entry()
        self._num_shards = await self._index.join(entry, self._num_shards)
        shard = home_shard(entry, self._num_shards)
        if self._shard is not None and shard != self._shard:
            self._left_shards.add(self._shard)
            self._lose(ResyncReason.SHARD)
        self._shard = shard

    async def _sweep(self) -> None:
        """Remove who has been dead since the last time: nobody else would take them out of the registry."""
        assert self._shard is not None
        listing = await self._index.list_replicas(self._shard)
        dead = {(entry.replica, entry.epoch) for entry in listing.dead} - {(self._entry().replica, self._entry().epoch)}
        for replica, epoch in dead & self._dead:
            await self._index.forget(self._shard, replica, epoch)
        self._dead = dead

    async def _beat(self) -> None:
        assert self._shard is not None
        entry = self._entry()
        beat = await self._index.heartbeat(self._keys, entry, self._position)
        if beat.epoch_before < entry.epoch:
            await self._index.forget(self._shard, entry.replica, beat.epoch_before)
        if self._is_exact:
            self._audit(beat.is_exact)
        if beat.num_replicas > MAX_SHARD_REPLICAS:
            self._num_shards *= 2
            self._next_upkeep_s = 0.0

    def _audit(self, is_match: bool) -> None:
        if is_match:
            self.num_matches += 1
        else:
            self.num_mismatches += 1
            self._lose(ResyncReason.MISMATCH)

    async def _keep_exact(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await (self._flush() if self._is_exact else self._resync())
                backoff_s = MIN_BACKOFF_S
            except REDIS_ERRORS as error:
                self._lose(ResyncReason.ERROR)
                self._note_failure(error)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1))
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _lose(self, reason: ResyncReason) -> None:
        """Have a snapshot sent."""
        if self._is_exact and reason is not ResyncReason.ERROR:  # errors are in the log already
            _log.info("snapshot due", reason=reason.value)
        self._resync_reason = reason
        self._is_exact = False
        self._pending = None
        self._changed.set()

    async def _flush(self) -> None:
        await asyncio.sleep(self._index.flush_interval_s)
        while await self._flush_delta():
            pass

    async def _flush_delta(self) -> bool:
        """Send the oldest changes. Returns whether there were any and they fitted."""
        async with self._turn:
            if not self._pending:
                return False
            delta = self._pending.take(MAX_CHANGES)
            after = self._position.after(delta)
            is_exact = await self._index.apply(self._keys, self._entry(), delta, self._position, after)
            if is_exact:
                self._position = after
            else:
                self._lose(ResyncReason.GAP)
            return is_exact

    async def _resync(self) -> None:
        self.resyncs[self._resync_reason] += 1
        await asyncio.sleep(random.uniform(0, RESYNC_JITTER_S))
        # First, so that the engine is not asked while Redis is away.
        async with self._turn:
            await self._join()
            shard, keys = self._shard, self._keys
            await self._index.discard_staged(keys)
        members = await self._collect()
        position = await asyncio.to_thread(Position.of, members, self._position.seq + 1)
        for first in range(0, len(members), MAX_CHANGES):
            async with self._turn:
                await self._index.stage(keys, members[first : first + MAX_CHANGES])
        async with self._turn:
            is_whole = await self._index.commit(keys, self._entry(), position)
            self._position = position
            self._is_exact = is_whole and self._pending is not None and shard == self._shard
        if not self._is_exact:
            self._lose(ResyncReason.INCOMPLETE)
        elif self._pending:
            self._changed.set()
        await self._leave_shards()

    async def _collect(self) -> list[bytes]:
        """Return all members as of now. What happens from now on is pending."""
        self._overlay = {}
        try:
            members = await asyncio.to_thread(_members, await self._snapshot())
            for member, is_added in self._overlay.items():
                (members.add if is_added else members.discard)(member)
            self._pending = PendingDelta()
        finally:
            self._overlay = None
        return list(members)

    async def _leave_shards(self) -> None:
        entry = self._entry()
        for shard in list(self._left_shards) if self._is_exact else ():
            await self._index.forget(shard, entry.replica, entry.epoch)
            self._left_shards.discard(shard)

    def _note_failure(self, error: Exception) -> None:
        if self.is_up is not False:
            _log.warning("redis does not answer", error=str(error) or type(error).__name__)
        self.is_up = False

    def _note_answer(self) -> None:
        if self.is_up is False:
            _log.info("redis answers again")
        self.is_up = True


def _members(digests: Iterable[bytes]) -> set[bytes]:
    return {index_member(digest) for digest in digests}
