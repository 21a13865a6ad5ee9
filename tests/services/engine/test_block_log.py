"""What those hear who watch an engine's blocks, whenever they come and however slow they are."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from kvern.engine.block_hash import DIGEST_BYTES, extend_digests, root_digest
from kvern.engine.block_pool import BlockContent, BlockPool
from kvern.services.engine import block_log
from kvern.services.engine.block_log import BlockLog
from kvern.v1.engine_pb2 import WatchBlocksResponse

BLOCK_SIZE = 4
EPOCH = 1_000_000


class Pool:
    """A block pool, and the log of what happens in it."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.log = BlockLog(EPOCH, BLOCK_SIZE, "door")
        self._pool = BlockPool(num_blocks, record_events=True)
        self._prompts: dict[bytes, tuple[int, ...]] = {}

    def compute(self, token_ids: list[int], *, is_told: bool = True) -> None:
        """Have a prompt cached, and tell the log at once."""
        chain = extend_digests(root_digest("contract", "door" if is_told else "other"), token_ids, BLOCK_SIZE)
        table = self._pool.find_prefix(chain)
        self._pool.share(table)
        parents = [None, *chain]
        for number in range(len(table), len(chain)):
            ids = array("I", token_ids[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE]).tobytes()
            content = BlockContent(parents[number], ids) if is_told else None
            if is_told:
                self._prompts[chain[number]] = tuple(token_ids[: (number + 1) * BLOCK_SIZE])
            table += self._pool.allocate(1)
            table[number] = self._pool.register(table[number], chain[number], parents[number], content)
        self._pool.release(table)
        self.log.record(self._pool.take_events())

    def reset(self) -> None:
        self._pool.reset()
        self.log.record(self._pool.take_events())

    def prompts(self) -> set[tuple[int, ...]]:
        """Return what is cached of the told salt: each block with all that comes before it."""
        return {prompt for digest, prompt in self._prompts.items() if self._pool.is_resident(digest)}


class Mirror:
    """What is known by who applies what is told. Nothing may be told of blocks whose parents are not known."""

    def __init__(self) -> None:
        self.prompts: dict[bytes, tuple[int, ...]] = {}
        self.sequence = 0
        self.num_snapshots = 0

    def apply(self, message: WatchBlocksResponse) -> None:
        if message.HasField("snapshot") and message.snapshot.index == 0:
            self.prompts.clear()
            self.num_snapshots += 1
        elif self.sequence:
            assert message.sequence == self.sequence + 1
        self.sequence = message.sequence
        for change in message.changes:
            if change.HasField("stored"):
                self._store(change.stored.parent, _split(change.stored.digests), list(change.stored.token_ids))
            else:
                for digest in _split(change.removed.digests):
                    del self.prompts[digest]

    def _store(self, parent: bytes, digests: list[bytes], token_ids: list[int]) -> None:
        prompt = self.prompts[parent] if parent else ()
        for number, digest in enumerate(digests):
            prompt += tuple(token_ids[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE])
            self.prompts[digest] = prompt

    async def follow(self, watch: AsyncIterator[WatchBlocksResponse], last: int) -> None:
        """Apply what is told up to a batch."""
        async with asyncio.timeout(30):
            while self.sequence < last:
                self.apply(await anext(watch))


def _split(digests: bytes) -> list[bytes]:
    return [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]


async def test_first_watch_begins_with_all_that_is_cached_and_goes_on_with_what_changes() -> None:
    pool, mirror = Pool(num_blocks=4), Mirror()
    pool.compute(list(range(12)))
    async with aclosing(pool.log.watch(0)) as watch:
        await mirror.follow(watch, EPOCH)
        assert set(mirror.prompts.values()) == {tuple(range(4)), tuple(range(8)), tuple(range(12))}
        pool.compute(list(range(100, 112)))  # evicts
        pool.compute(list(range(100, 108)))  # changes nothing
        pool.compute(list(range(8)))
        await mirror.follow(watch, EPOCH + 2)
    assert set(mirror.prompts.values()) == pool.prompts()
    assert mirror.num_snapshots == 1


async def test_chain_that_is_computed_at_once_is_told_as_one_change() -> None:
    pool = Pool()
    pool.compute(list(range(12)))
    async with aclosing(pool.log.watch(EPOCH)) as watch:
        [change] = (await anext(watch)).changes
    assert (change.stored.parent, len(_split(change.stored.digests))) == (b"", 3)
    assert list(change.stored.token_ids) == list(range(12))


async def test_reset_takes_everything_back() -> None:
    pool, mirror = Pool(), Mirror()
    pool.compute(list(range(12)))
    pool.reset()
    async with aclosing(pool.log.watch(EPOCH)) as watch:
        await mirror.follow(watch, EPOCH + 1)
    assert mirror.prompts == {}


async def test_blocks_of_other_salts_are_not_told() -> None:
    pool, mirror = Pool(num_blocks=6), Mirror()
    pool.compute(list(range(8)), is_told=False)
    pool.compute(list(range(8)))
    pool.compute(list(range(50, 70)), is_told=False)
    async with aclosing(pool.log.watch(0)) as watch:
        pool.compute(list(range(4)))
        await mirror.follow(watch, EPOCH + 1)
    assert set(mirror.prompts.values()) == pool.prompts() == {tuple(range(4))}


async def test_watch_from_a_batch_that_is_kept_goes_on_there() -> None:
    pool, mirror = Pool(), Mirror()
    for number in range(3):
        pool.compute([number] * BLOCK_SIZE)
    async with aclosing(pool.log.watch(EPOCH + 1)) as watch:
        await mirror.follow(watch, EPOCH + 2)
    assert set(mirror.prompts.values()) == {(1,) * BLOCK_SIZE, (2,) * BLOCK_SIZE}
    assert mirror.num_snapshots == 0


@pytest.mark.parametrize("start", [1, EPOCH - 1, EPOCH + 2, 2**64 - 1])
async def test_watch_from_a_batch_that_there_is_not_begins_with_a_snapshot(start: int) -> None:
    pool = Pool()
    pool.compute(list(range(4)))
    async with aclosing(pool.log.watch(start)) as watch:
        message = await anext(watch)
    assert (message.sequence, message.snapshot.count, message.snapshot.num_blocks) == (EPOCH, 1, 1)


async def test_watch_that_falls_behind_gets_a_snapshot_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_log, "MAX_HISTORY_BYTES", 200)
    pool, mirror = Pool(), Mirror()
    pool.compute([0] * BLOCK_SIZE)
    async with aclosing(pool.log.watch(EPOCH)) as watch:
        mirror.apply(await anext(watch))
        for number in range(1, 20):
            pool.compute([number] * BLOCK_SIZE)
        await mirror.follow(watch, EPOCH + 19)
        pool.compute([20] * BLOCK_SIZE)
        await mirror.follow(watch, EPOCH + 20)
    assert mirror.num_snapshots == 1
    assert set(mirror.prompts.values()) == pool.prompts()


async def test_large_snapshot_comes_in_parts_with_parents_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_log, "MAX_MESSAGE_TOKENS", 3 * BLOCK_SIZE)
    pool, mirror = Pool(num_blocks=20), Mirror()
    pool.compute([*range(40)])
    pool.compute([*range(20), *range(60, 80)])
    async with aclosing(pool.log.watch(0)) as watch:
        parts = [await anext(watch) for _ in range(5)]
    assert [(part.snapshot.index, part.snapshot.count, part.snapshot.num_blocks) for part in parts] == [
        (index, 5, 15) for index in range(5)
    ]
    for part in parts:
        mirror.apply(part)
    assert set(mirror.prompts.values()) == pool.prompts()
    assert mirror.sequence == EPOCH + 5  # 10 blocks made four batches, 5 two


async def test_watch_from_within_a_snapshot_that_broke_off_begins_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts have the numbers of batches that are kept, which do not bring what the other parts would have."""
    monkeypatch.setattr(block_log, "MAX_MESSAGE_TOKENS", BLOCK_SIZE)
    pool, mirror = Pool(), Mirror()
    for number in range(5):
        pool.compute([number] * BLOCK_SIZE)
    async with aclosing(pool.log.watch(0)) as watch:
        for _ in range(3):
            mirror.apply(await anext(watch))
    async with aclosing(pool.log.watch(mirror.sequence + 1)) as watch:
        await mirror.follow(watch, EPOCH + 4)
    assert set(mirror.prompts.values()) == pool.prompts()
    async with aclosing(pool.log.watch(mirror.sequence + 1)) as watch:
        pool.compute([9] * BLOCK_SIZE)
        await mirror.follow(watch, EPOCH + 5)
    assert mirror.num_snapshots == 2
