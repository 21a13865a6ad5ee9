"""What is cached under one salt, with its token ids, and how it came to be: for those who watch an engine's blocks."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvern.engine.block_pool import BlockContent, CacheEvent
from kvern.v1 import engine_pb2

MAX_HISTORY_BYTES = 16 * 2**20
"""Of batches that are kept for those who come back, or do not keep up. What is older is told as a snapshot."""

MAX_MESSAGE_TOKENS = 16384
"""Of all blocks that a message speaks of. It takes half a millisecond to build, and stays under 1 MiB."""


class BlockLog:
    """All methods belong to the event loop. Those who watch share one history, so a slow one holds nothing up.

    It keeps each cached block's content: four bytes a token and some 250 a block.
    """

    def __init__(self, epoch: int, block_size: int, salt: str) -> None:
        """epoch: batches are numbered from there, so higher than any of an earlier start."""
        self.salt = salt
        self._max_changes = max(1, MAX_MESSAGE_TOKENS // block_size)
        self._blocks: dict[bytes, BlockContent] = {}
        """Parents before children: they are added in that order, and none goes before its children."""
        self._history: dict[int, engine_pb2.WatchBlocksResponse] = {}
        self._history_bytes = 0
        self._first = self._next = epoch
        self._amid: deque[range] = deque()
        """Of snapshots told: where who has some of the parts would go on. Their numbers are also those of batches."""
        self._changed = asyncio.Event()

    def record(self, events: Iterable[CacheEvent]) -> None:
        """Take what happened in the block pool, in order. What has no content, or had none, is of other salts."""
        told = [event for event in events if self._apply(event)]
        for start in range(0, len(told), self._max_changes):
            changes = _to_changes(told[start : start + self._max_changes])
            self._append(engine_pb2.WatchBlocksResponse(sequence=self._next, changes=changes))
        if told:
            self._changed.set()
            self._changed = asyncio.Event()

    async def watch(self, start: int) -> AsyncGenerator[engine_pb2.WatchBlocksResponse, None]:
        """Yield batches from `start` on, for ever. What is not kept any more, or never was, a snapshot stands for, and
        so it does where a snapshot broke off."""
        position = 0 if any(start in numbers for numbers in self._amid) else start
        while True:
            changed = self._changed
            if not self._first <= position <= self._next:
                position = self._next
                for part in self._snapshot():
                    yield part
            while position in self._history:
                yield self._history[position]
                position += 1
            if position == self._next:
                await changed.wait()

    def _apply(self, event: CacheEvent) -> bool:
        if event.content is not None:
            self._blocks[event.digest] = event.content
            return True
        return self._blocks.pop(event.digest, None) is not None

    def _append(self, batch: engine_pb2.WatchBlocksResponse) -> None:
        self._history[self._next] = batch
        self._next += 1
        self._history_bytes += batch.ByteSize()
        while self._history_bytes > MAX_HISTORY_BYTES:
            self._history_bytes -= self._history.pop(self._first).ByteSize()
            self._first += 1
        while self._amid and self._amid[0].stop <= self._first:
            self._amid.popleft()

    def _snapshot(self) -> Iterator[engine_pb2.WatchBlocksResponse]:
        """Build the parts of a snapshot one by one, all of this moment."""
        blocks = list(self._blocks.items())
        count = max(1, -(-len(blocks) // self._max_changes))
        first = self._next - count
        amid = range(first + 1, self._next)
        if amid and amid not in self._amid:
            self._amid.append(amid)
        for index in range(count):
            part = blocks[index * self._max_changes : (index + 1) * self._max_changes]
            yield engine_pb2.WatchBlocksResponse(
                sequence=first + index,
                changes=_to_changes([CacheEvent(digest, True, content) for digest, content in part]),
                snapshot=engine_pb2.SnapshotPart(index=index, count=count, num_blocks=len(blocks)),
            )


@dataclass(slots=True)
class _Run:
    """Events that one change tells: blocks of a chain that were added, or some that were removed."""

    is_added: bool
    parent: bytes | None
    digests: list[bytes] = field(default_factory=list)
    token_ids: array[int] = field(default_factory=lambda: array("I"))

    def takes(self, event: CacheEvent) -> bool:
        if event.content is None:
            return not self.is_added
        return self.is_added and event.content.parent == self.digests[-1]

    def append(self, event: CacheEvent) -> None:
        self.digests.append(event.digest)
        if event.content is not None:
            self.token_ids.frombytes(event.content.token_ids)

    def to_change(self) -> engine_pb2.BlockChange:
        digests = b"".join(self.digests)
        if not self.is_added:
            return engine_pb2.BlockChange(removed=engine_pb2.RemovedBlocks(digests=digests))
        stored = engine_pb2.StoredBlocks(parent=self.parent or b"", digests=digests, token_ids=self.token_ids)
        return engine_pb2.BlockChange(stored=stored)


def _to_changes(events: Sequence[CacheEvent]) -> list[engine_pb2.BlockChange]:
    runs: list[_Run] = []
    for event in events:
        if not runs or not runs[-1].takes(event):
            runs.append(_Run(event.is_added, None if event.content is None else event.content.parent))
        runs[-1].append(event)
    return [run.to_change() for run in runs]
