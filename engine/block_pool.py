"""The KV memory as a pool of blocks, like pages of virtual memory: reference counts, a prefix cache, LRU eviction.

Invariants, checked by `check_integrity`:

1. Free and referenced blocks add up to the pool; a block is free if and only if nobody refers to it.
2. A digest has one physical block.
3. Residency is prefix-closed: the parent of a resident digest is resident.
4. A digest is registered when its block's KV is computed, by a request that holds the block.
5. Free blocks without a digest are evicted first, then the least recently freed.

The third rests on requests freeing their tail first, and on the chain rule: a request registers block n, or is pointed
at a resident one, only if block n - 1 of its table is the resident block of its digest.

What becomes resident and what stops to be is told as events, for the index of all replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Block:
    """One physical block, and a node of the free list."""

    __slots__ = ("block_id", "digest", "next", "parent", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.digest: bytes | None = None
        self.parent: bytes | None = None
        self.prev = self.next = self


class FreeList:
    """A doubly linked list through the blocks themselves: removal from the middle, where a cached block is reused, is
    O(1), which a deque cannot do."""

    def __init__(self) -> None:
        self._head = Block(-1)
        self.length = 0

    def __iter__(self) -> Iterator[Block]:
        node = self._head.next
        while node is not self._head:
            yield node
            node = node.next

    def push_first(self, block: Block) -> None:
        """Insert where blocks are taken from."""
        self._insert(block, self._head)

    def push_last(self, block: Block) -> None:
        self._insert(block, self._head.prev)

    def pop_first(self) -> Block:
        block = self._head.next
        if block is self._head:
            raise RuntimeError("no free block left: the caller must check num_free first")
        self._head.next, block.next.prev = block.next, self._head
        block.prev = block.next = block
        self.length -= 1
        return block

    def remove(self, block: Block) -> None:
        block.prev.next = block.next
        block.next.prev = block.prev
        block.prev = block.next = block
        self.length -= 1

    def _insert(self, block: Block, after: Block) -> None:
        block.prev = after
        block.next = after.next
        after.next.prev = block
        after.next = block
        self.length += 1


class BlockContent(NamedTuple):
    """What a cached block holds."""

    parent: bytes | None
    """Digest of the block before it, None for a chain's first one."""
    token_ids: bytes
    """As 32-bit numbers of this machine: four bytes a token, where a tuple takes up to forty."""


class CacheEvent(NamedTuple):
    """A digest became resident, or stopped to be. Each digest's events alternate."""

    digest: bytes
    is_added: bool
    content: BlockContent | None = None
    """Of one that became resident, where it is to be told."""


class BlockPool:
    """`num_blocks` physical blocks, made once."""

    def __init__(self, num_blocks: int, *, record_events: bool = False) -> None:
        """record_events: keep what `take_events` returns. Somebody must then take it."""
        self._record_events = record_events
        self._events: list[CacheEvent] = []
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._resident: dict[bytes, Block] = {}
        self._free = FreeList()
        for block in self._blocks:
            self._free.push_last(block)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        """Blocks nobody refers to, cached ones included."""
        return self._free.length

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def find_prefix(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest resident prefix of a chain of digests."""
        found = []
        for digest in digests:
            block = self._resident.get(digest)
            if block is None:
                break
            found.append(block.block_id)
        return found

    def count_unreferenced(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks `share` would take off the free list."""
        return sum(self._blocks[block_id].ref_count == 0 for block_id in block_ids)

    def share(self, block_ids: Iterable[int]) -> None:
        """Take one more reference to each block."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks for writing, and forget what they cached. Raises RuntimeError when there are fewer."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        block = self._free.pop_first()
        if block.digest is not None:
            self._forget(block)
        block.ref_count = 1
        return block.block_id

    def _forget(self, block: Block) -> None:
        assert block.digest is not None
        del self._resident[block.digest]
        self._record(block.digest, False)
        block.digest = block.parent = None

    def _record(self, digest: bytes, is_added: bool, content: BlockContent | None = None) -> None:
        if self._record_events:
            self._events.append(CacheEvent(digest, is_added, content))

    def take_events(self) -> list[CacheEvent]:
        """Return what happened since the last call, in order: parents are added before children and removed after."""
        events, self._events = self._events, []
        return events

    def release(self, block_ids: Sequence[int]) -> None:
        """Give back one reference to each block of a table, in the table's order.

        The tail goes first, so that it is also evicted first and a cached prefix shrinks from its end.
        """
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            if block.ref_count <= 0:
                raise RuntimeError(f"block {block_id} is released more often than it is held")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._push_free(block)

    def _push_free(self, block: Block) -> None:
        if block.digest is None:
            self._free.push_first(block)
        else:
            self._free.push_last(block)

    def register(self, block_id: int, digest: bytes, parent: bytes | None, content: BlockContent | None = None) -> int:
        """Make a computed block findable by its digest, and return the digest's block.

        That is another one if the digest is resident already: the caller then holds a reference to it in place of its
        own block, which is freed. parent: the digest before it, None for a chain's first block. content: goes into
        the event.
        """
        resident = self._resident.get(digest)
        if resident is None:
            block = self._blocks[block_id]
            block.digest, block.parent = digest, parent
            self._resident[digest] = block
            self._record(digest, True, content)
            return block_id
        if resident.block_id != block_id:
            self.share([resident.block_id])
            self.release([block_id])
        return resident.block_id

    def is_exclusive(self, block_id: int) -> bool:
        """Whether one table holds a block and nobody can find it. Others must be copied before they are written to."""
        block = self._blocks[block_id]
        return block.ref_count == 1 and block.digest is None

    def is_resident(self, digest: bytes) -> bool:
        return digest in self._resident

    @property
    def resident_digests(self) -> list[bytes]:
        """All digests, parents before children: a snapshot for the index."""
        ordered: dict[bytes, None] = {}
        for digest in self._resident:
            chain = []
            node: bytes | None = digest
            while node is not None and node not in ordered:
                chain.append(node)
                node = self._resident[node].parent
            ordered.update(dict.fromkeys(reversed(chain)))
        return list(ordered)

    def reset(self) -> None:
        """Forget all digests. Running requests keep their blocks and must register nothing any more."""
        self._drop(self._resident.keys())

    def drop(self, digests: Iterable[bytes]) -> None:
        """Forget digests, and all that descends from them: what follows from wrong KV is wrong."""
        doomed = {digest for digest in digests if digest in self._resident}
        for digest in self.resident_digests:
            if self._resident[digest].parent in doomed:
                doomed.add(digest)
        self._drop(doomed)

    def _drop(self, digests: Iterable[bytes]) -> None:
        doomed = set(digests)
        for digest in reversed(self.resident_digests):
            if digest in doomed:
                block = self._resident[digest]
                self._forget(block)
                if block.ref_count == 0:
                    # Nothing can find it any more: the first to be taken.
                    self._free.remove(block)
                    self._free.push_first(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError naming the first invariant that does not hold.

        tables: block tables of all requests that hold blocks.
        """
        references = [0] * self.num_blocks
        for table in tables:
            for block_id in table:
                references[block_id] += 1
        free = {block.block_id for block in self._free}
        assert len(free) == self._free.length, "the free list's length is off"
        for block in self._blocks:
            name = f"block {block.block_id}"
            assert block.ref_count == references[block.block_id], f"{name}: ref_count is not the number of holders"
            assert (block.ref_count == 0) == (block.block_id in free), f"{name}: free and referenced, or neither"
            if block.digest is not None:
                assert self._resident.get(block.digest) is block, f"{name}: a digest with another block"
                assert block.parent is None or block.parent in self._resident, f"{name}: its parent is not resident"
        assert len(self._resident) == sum(block.digest is not None for block in self._blocks), "a stale digest"
