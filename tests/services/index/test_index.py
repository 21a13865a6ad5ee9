"""The contract of index and registry, the same on every kind of Redis."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from kvern.services.engine import index_writer
from kvern.services.engine.index_writer import ResyncReason, StaleEpoch
from kvern.services.engine.replica_index import EXPIRY_S, ReplicaIndex
from kvern.services.router.index_reader import IndexReader
from kvern.services.runtime.redis_index import RedisClient
from kvern.services.runtime.redis_index.keys import POOLS_KEY, Shard, home_shard
from tests.services.index.indexed_pool import (
    CONTRACT,
    MODEL,
    IndexedPool,
    LossyIndex,
    eventually,
    matches,
    prompt_digests,
    settled,
)

PROMPT = prompt_digests(range(40))
OTHER = prompt_digests([0, 1, 2, 3, *range(100, 136)])


async def test_match_of_several_replicas_is_each_ones_longest_prefix(redis: RedisClient, reader: IndexReader) -> None:
    async with AsyncExitStack() as stack:
        lengths = (0, 1, 4, 9, 10)
        pools = [await stack.enter_async_context(IndexedPool(redis, f"10.0.0.{length}:1")) for length in lengths]
        for pool, length in zip(pools, lengths, strict=True):
            pool.serve(PROMPT[:length])
            pool.serve(OTHER)
        await settled(reader, PROMPT, *pools)
        assert await matches(reader, PROMPT) == {"10.0.0.0:1": 1, "10.0.0.1:1": 1, "10.0.0.4:1": 4} | {
            "10.0.0.9:1": 9,
            "10.0.0.10:1": 10,
        }


async def test_match_of_another_contract_or_model_finds_nothing(redis: RedisClient, reader: IndexReader) -> None:
    """F21: replicas of one name with other weights."""
    async with IndexedPool(redis) as replica:
        replica.serve(PROMPT)
        await settled(reader, PROMPT, replica)
    assert await reader.match(MODEL, "other weights", b"".join(PROMPT), 5) == {}
    assert await reader.match("other", CONTRACT, b"".join(PROMPT), 5) == {}


async def test_eviction_shortens_the_match(redis: RedisClient, reader: IndexReader) -> None:
    async with IndexedPool(redis, num_blocks=12) as replica:
        replica.serve(PROMPT)
        await settled(reader, PROMPT, replica)
        replica.serve(prompt_digests(range(1000, 1032)))
        assert replica.matched(PROMPT) == 4
        await settled(reader, PROMPT, replica)


async def test_salts_keep_prompts_apart(redis: RedisClient, reader: IndexReader) -> None:
    """F13."""
    async with IndexedPool(redis) as replica:
        replica.serve(prompt_digests(range(40), salt="a"))
        await settled(reader, prompt_digests(range(40), salt="a"), replica)
        assert await matches(reader, prompt_digests(range(40), salt="b")) == {replica.replica: 0}


async def test_block_of_two_holders_is_removed_with_the_last_copy(redis: RedisClient, reader: IndexReader) -> None:
    """F05: the same prompt of whole blocks runs twice, then is evicted."""
    async with IndexedPool(redis, num_blocks=20) as replica:
        first = replica.hold(PROMPT)
        second = replica.hold(PROMPT, is_computed_anew=True)
        await settled(reader, PROMPT, replica)
        replica.pool.release(first)
        replica.serve(prompt_digests(range(1000, 1040)))
        assert replica.matched(PROMPT) == 10
        await settled(reader, PROMPT, replica)
        replica.pool.release(second)
        replica.serve(prompt_digests(range(2000, 2080)))
        assert replica.matched(PROMPT) == 0
        await settled(reader, PROMPT, replica)


async def test_reset_leaves_nothing_indexed(redis: RedisClient, reader: IndexReader) -> None:
    """F04."""
    async with IndexedPool(redis) as replica:
        replica.serve(PROMPT)
        await settled(reader, PROMPT, replica)
        replica.pool.reset()
        replica.publish()
        await settled(reader, PROMPT, replica)
        assert await redis.exists(replica.keys.blocks) == 0


async def test_replica_that_restarts_has_nothing_indexed(redis: RedisClient, reader: IndexReader) -> None:
    """F01, F02: under the same name, without a word from the start before."""
    old = IndexedPool(redis)
    async with old:
        old.serve(PROMPT)
        await settled(reader, PROMPT, old)
    async with IndexedPool(redis, epoch=old.epoch + 1) as new:
        await settled(reader, PROMPT, new)
        await eventually(lambda: _has_nothing(redis, old))
        new.serve(PROMPT[:3])
        await settled(reader, PROMPT, new)


async def test_writer_of_an_old_epoch_is_told_and_ends(redis: RedisClient, reader: IndexReader) -> None:
    """F02: the old process hung and wakes up."""
    async with IndexedPool(redis) as old:
        old.serve(PROMPT)
        await settled(reader, PROMPT, old)
        async with IndexedPool(redis, epoch=old.epoch + 1) as new:
            with pytest.raises(StaleEpoch):
                await old.ended()
            await settled(reader, PROMPT, new)
            await old.writer.close()
            assert (await reader.refresh())[new.replica].epoch == new.epoch


async def test_stale_writer_changes_no_blocks(redis: RedisClient) -> None:
    async with IndexedPool(redis, epoch=2 << 40) as new:
        await new.exact()
        old = IndexedPool(redis, epoch=1 << 40)
        index, entry = ReplicaIndex(redis), old.entry()
        await index.stage(old.keys, [b"8 bytes."])
        with pytest.raises(StaleEpoch):
            await index.commit(old.keys, entry, old.writer._position)
        assert await redis.exists(old.keys.blocks, old.keys.staging) == 0


async def test_dropped_update_is_noticed_and_mended(redis: RedisClient, reader: IndexReader) -> None:
    """F06: by the next heartbeat's audit, or by the next update, which does not fit."""
    async with IndexedPool(redis) as replica:
        replica.writer._index = index = LossyIndex(redis)
        await replica.exact()
        index.num_to_lose = 1
        replica.serve(PROMPT)
        await settled(reader, PROMPT, replica)
        assert replica.writer.num_resyncs == 2


@pytest.mark.parametrize("damage", ["SPOP", "DEL"])
async def test_blocks_changed_behind_the_writer_are_mended(
    redis: RedisClient, reader: IndexReader, damage: str
) -> None:
    async with IndexedPool(redis) as replica:
        replica.serve(PROMPT)
        await settled(reader, PROMPT, replica)
        await redis.execute_command(damage, replica.keys.blocks)
        await settled(reader, PROMPT, replica)


async def test_flushed_redis_is_filled_again(redis: RedisClient, reader: IndexReader) -> None:
    async with IndexedPool(redis) as replica:
        replica.serve(PROMPT)
        await settled(reader, PROMPT, replica)
        await redis.flushall()
        await settled(reader, PROMPT, replica)
        writer = replica.writer
        assert (writer.resyncs[ResyncReason.START], writer.resyncs[ResyncReason.MISMATCH]) == (1, 1)
        assert (writer.num_mismatches, writer.num_pending, writer.is_up) == (1, 0, True)
        assert (await reader.refresh())[replica.replica] == replica.entry()


async def test_scripts_forgotten_by_the_server_are_sent_again(redis: RedisClient, reader: IndexReader) -> None:
    async with IndexedPool(redis) as replica:
        await settled(reader, PROMPT, replica)
        await redis.script_flush()
        replica.serve(PROMPT)
        await settled(reader, PROMPT, replica)
        assert replica.writer.num_resyncs == 1


async def test_events_during_a_snapshot_are_neither_lost_nor_doubled(redis: RedisClient, reader: IndexReader) -> None:
    class Busy(IndexedPool):
        async def _snapshot(self) -> list[bytes]:
            self.serve(PROMPT[:6])
            digests = await super()._snapshot()
            # The event loop may record what comes after a snapshot before it hands the snapshot over.
            self.serve(PROMPT)
            self.serve(prompt_digests(range(1000, 1100)))
            return digests

    async with Busy(redis) as replica:
        await settled(reader, PROMPT, replica)
        await settled(reader, prompt_digests(range(1000, 1100)), replica)
        assert replica.writer.num_resyncs == 1


async def test_registry_tells_what_the_replica_says(redis: RedisClient, reader: IndexReader) -> None:
    """F11: the block size is the replica's own."""
    async with IndexedPool(redis, block_size=32) as replica:
        await eventually(lambda: _is_registered(reader, replica))
        assert (await reader.refresh())[replica.replica] == replica.entry()
        assert (await reader.refresh())[replica.replica].block_size == 32
        replica.state = "draining"
        await eventually(lambda: _has_state(reader, replica, "draining"))


async def test_closed_writer_leaves_no_entry(redis: RedisClient, reader: IndexReader) -> None:
    async with IndexedPool(redis) as replica:
        replica.serve(PROMPT)
        await settled(reader, PROMPT, replica)
    await replica.writer.close()
    assert await reader.refresh() == {}
    assert await redis.exists(*replica.keys) == 0


async def test_registered_without_a_lease_is_not_listed(redis: RedisClient, reader: IndexReader) -> None:
    async with IndexedPool(redis) as replica:
        await settled(reader, PROMPT, replica)
    await redis.delete(replica.keys.lease)
    await eventually(lambda: _lists_nobody(reader))  # the last heartbeat may be on its way to a server that stood still


async def test_dead_replica_is_removed_by_the_living(
    redis: RedisClient, reader: IndexReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_writer, "UPKEEP_S", 0.1)
    dead = IndexedPool(redis, "dead")
    async with dead:
        await settled(reader, PROMPT, dead)
    await redis.delete(dead.keys.lease)
    async with IndexedPool(redis, "alive") as alive:
        await eventually(lambda: _is_gone(redis, dead))
        await settled(reader, PROMPT, alive)


async def test_entries_expire(redis: RedisClient, reader: IndexReader) -> None:
    async with IndexedPool(redis) as replica:
        replica.serve(PROMPT)
        await settled(reader, PROMPT, replica)
        replica.serve(OTHER)
        await settled(reader, OTHER, replica)
    for key in (replica.keys.registry, replica.keys.meta, replica.keys.blocks):
        assert EXPIRY_S - 60 < await redis.ttl(key) <= EXPIRY_S
    assert 0 < await redis.pttl(replica.keys.lease) <= 5000


async def test_pool_of_more_replicas_than_a_shard_takes_gets_more_shards(
    redis: RedisClient, reader: IndexReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_writer, "MAX_SHARD_REPLICAS", 2)
    monkeypatch.setattr(index_writer, "UPKEEP_S", 0.2)
    async with AsyncExitStack() as stack:
        pools = [await stack.enter_async_context(IndexedPool(redis, f"replica-{number}")) for number in range(5)]
        for number, pool in enumerate(pools):
            pool.serve(PROMPT[: number + 1])
        await settled(reader, PROMPT, *pools)

        async def has_spread() -> bool:
            num_shards = len(reader._pools[next(iter(reader._pools))])
            await settled(reader, PROMPT, *pools)
            return num_shards > 1

        await eventually(has_spread)


async def test_pool_that_nobody_joins_any_more_is_not_listed(redis: RedisClient) -> None:
    await redis.hset(POOLS_KEY, "gone", '{"model": "m", "contract": "c", "num_shards": 4, "joined_s": 1000}')
    index = ReplicaIndex(redis)
    entry = IndexedPool(redis).entry()
    assert await index.join(entry, 2) == 2
    assert await index.join(entry, 1) == 2
    assert await redis.hkeys(POOLS_KEY) == [home_shard(entry, 1).pool.encode()]


async def test_entry_of_a_version_to_come_is_left_out(redis: RedisClient, reader: IndexReader) -> None:
    async with IndexedPool(redis) as replica:
        await settled(reader, PROMPT, replica)
        await redis.hset(replica.keys.registry, "from the future", '{"epoch": "00ff"}')
        assert list(await reader.refresh()) == [replica.replica]


async def test_watch_tells_entries(redis: RedisClient, reader: IndexReader) -> None:
    async with IndexedPool(redis) as replica:
        seen: set[str] = set()
        watching = asyncio.create_task(reader.watch(seen.update))
        await eventually(lambda: seen == {replica.replica})
        watching.cancel()


async def test_match_of_no_digests_is_nothing(redis: RedisClient, reader: IndexReader) -> None:
    """F10: prompts shorter than a block."""
    async with IndexedPool(redis) as replica:
        await settled(reader, PROMPT, replica)
        assert await reader.match(MODEL, CONTRACT, b"", 5) == {}


def test_keys_of_a_shard_share_a_slot() -> None:
    """F16: also where a replica's name has braces."""
    from redis.crc import key_slot

    from kvern.services.runtime.redis_index.keys import ReplicaKeys

    shard = Shard("0123456789abcdef", 7)
    keys = [key for replica in ("a", "{b}", "c}{") for key in ReplicaKeys.of(shard, replica, 1)]
    assert len({key_slot(key.encode()) for key in keys}) == 1
    assert len(set(keys)) == 1 + 3 * 4


async def _is_registered(reader: IndexReader, replica: IndexedPool) -> bool:
    return replica.replica in await reader.refresh()


async def _has_state(reader: IndexReader, replica: IndexedPool, state: str) -> bool:
    return (await reader.refresh())[replica.replica].state == state


async def _lists_nobody(reader: IndexReader) -> bool:
    return not await reader.refresh()


async def _has_nothing(redis: RedisClient, replica: IndexedPool) -> bool:
    return not await redis.exists(replica.keys.blocks, replica.keys.meta)


async def _is_gone(redis: RedisClient, replica: IndexedPool) -> bool:
    return not await redis.hexists(replica.keys.registry, replica.replica)
