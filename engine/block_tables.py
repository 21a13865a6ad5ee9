"""Which blocks each request holds: admission with prefix hits, growth, copy on write, registering, release.

The scheduler decides who runs; this decides what memory that takes. Requests' tables change here and nowhere else.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from kvern.engine.block_hash import DEFAULT_KEY, extend_digests, root_digest
from kvern.engine.block_pool import BlockContent, BlockPool
from kvern.engine.coalescing import BlocksInProgress
from kvern.engine.request import Request, RequestStatus


class BlockTables:
    """All requests' block tables over one pool."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        contract: str,
        enable_prefix_caching: bool,
        digest_key: bytes = DEFAULT_KEY,
        told_salt: str | None = None,
    ) -> None:
        """told_salt: blocks cached under it are told with their token ids. None: none are."""
        self.pool = pool
        self.in_progress = BlocksInProgress()
        self._block_size = block_size
        self._contract = contract
        self._digest_key = digest_key
        self._enable_prefix_caching = enable_prefix_caching
        self._told_salt = told_salt

    def admit(self, request: Request, *, spare_blocks: int) -> bool:
        """Give a request blocks for all its known tokens, reusing what is resident, if `spare_blocks` are left then.

        Sets where its computation starts. Returns False, with nothing changed, where there are too few.
        """
        request.num_writable_tokens = 0
        if request.block_ids:  # it was parked, and nobody needed its blocks
            return self._reserve(request, spare_blocks)
        shared, num_resident = self._find_shared(request)
        num_new = self.num_blocks(request.num_tokens) - len(shared)
        if num_new + self.pool.count_unreferenced(shared) + spare_blocks > self.pool.num_free:
            return False
        self.pool.share(shared)
        request.block_ids = shared + self.pool.allocate(num_new)
        request.num_resident_tokens = num_resident
        # The last known token always runs, to be sampled from.
        request.num_computed_tokens = request.num_scheduled_tokens = min(num_resident, request.num_tokens - 1)
        request.num_chained_blocks = self._count_chained(request, len(shared))
        self._lead(request)
        return True

    def awaited_leader(self, request: Request) -> Request | None:
        """Return the running twin that is computing the request's next missing block, if one is."""
        if request.block_ids or not (self._reads_cache(request) and self._writes_cache(request)):
            return None
        if request.awaited_digest is None or self.pool.is_resident(request.awaited_digest):
            self._extend_digests(request, request.num_tokens // self._block_size)
            missing = (digest for digest in request.block_digests if not self.pool.is_resident(digest))
            request.awaited_digest = next(missing, None)
        return None if request.awaited_digest is None else self.in_progress.leader(request.awaited_digest)

    def grow(self, request: Request, num_tokens: int, copies: list[tuple[int, int]]) -> bool:
        """Let a table hold `num_tokens` tokens, to be written next. Returns False, with nothing changed, where too few
        blocks are free.

        copies: gets (source, destination) of a block to copy first.
        """
        num_new = max(0, self.num_blocks(num_tokens) - len(request.block_ids))
        has_begun_block = request.num_scheduled_tokens % self._block_size > 0
        must_copy = has_begun_block and self._must_copy(request)
        if num_new + must_copy > self.pool.num_free:
            return False
        if must_copy:
            copies.append(self._copy_tail(request))
        request.block_ids += self.pool.allocate(num_new)
        if request.num_scheduled_tokens >= request.num_resident_tokens:
            request.num_writable_tokens = len(request.block_ids) * self._block_size
        return True

    def register_computed(self, request: Request) -> None:
        """Make full computed blocks findable, in order, for as long as the chain from the first one holds."""
        num_full = request.num_computed_tokens // self._block_size
        if num_full <= request.num_chained_blocks or not self._writes_cache(request):
            return
        self._extend_digests(request, num_full)
        digests, block_ids = request.block_digests, request.block_ids
        for index in range(request.num_chained_blocks, num_full):
            digest, block_id, parent = digests[index], block_ids[index], digests[index - 1] if index else None
            resident_id = self.pool.register(block_id, digest, parent, self._content(request, index, parent))
            if resident_id == block_id:
                request.registered_digests.append(digest)
            else:
                self._replace(request, index, resident_id)
            self.in_progress.done(digest)
        request.num_chained_blocks = num_full

    def release(self, request: Request) -> None:
        """Take all blocks of a request. A step in flight that was planned on them advances nothing."""
        self.in_progress.stop_leading(request)
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.table_generation += 1
        request.num_computed_tokens = request.num_scheduled_tokens = request.num_resident_tokens = 0
        request.num_chained_blocks = request.first_changed_block = request.num_writable_tokens = 0
        request.may_register = True

    def reset_cache(self, holders: Sequence[Request]) -> None:
        """Forget all cached blocks. `holders`, all requests with blocks, keep them and register nothing more.

        Not even those that have registered nothing yet: what runs now was begun before the reset.
        """
        self.pool.reset()
        for request in holders:
            self._stop_registering(request)

    def drop_computed_by(self, request: Request, holders: Sequence[Request]) -> None:
        """Forget the blocks a request registered, and what descends from them: what it computes is not to be reused."""
        self.pool.drop(request.registered_digests)
        self._check_chains(holders)

    def stop_leading(self, request: Request) -> None:
        """Let nobody wait for a request that may not go on soon."""
        self.in_progress.stop_leading(request)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError if a request would write into a block that is not its own."""
        for request in requests:
            tail = request.block_ids[request.num_scheduled_tokens // self._block_size :]
            is_safe = request.num_writable_tokens == 0 or all(map(self.pool.is_exclusive, tail))
            assert is_safe, f"request {request.request_id} would write into a block that is not its own"

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _check_chains(self, holders: Sequence[Request]) -> None:
        """Stop those from registering whose chain has lost a block: a child must not outlive its parent."""
        for request in holders:
            chain = request.block_digests[: request.num_chained_blocks]
            if not all(self.pool.is_resident(digest) for digest in chain):
                self._stop_registering(request)

    def _stop_registering(self, request: Request) -> None:
        request.may_register = False
        self.in_progress.stop_leading(request)

    def _reserve(self, request: Request, spare_blocks: int) -> bool:
        missing = self.num_blocks(request.num_tokens) - len(request.block_ids)
        if max(0, missing) + spare_blocks > self.pool.num_free:
            return False
        if missing > 0:
            request.block_ids += self.pool.allocate(missing)
        self._lead(request)
        return True

    def _find_shared(self, request: Request) -> tuple[list[int], int]:
        """Return blocks a request can begin with, and how many tokens they hold for it."""
        parent = request.fork_of
        if parent is not None and self._can_fork(request, parent):
            parent.num_writable_tokens = 0
            return parent.block_ids[: self.num_blocks(request.num_tokens)], request.num_tokens
        hits = self._find_hits(request)
        return hits, len(hits) * self._block_size

    def _can_fork(self, request: Request, parent: Request) -> bool:
        """Whether all that a request knows is in the blocks of a running one, or will be before its own step runs."""
        is_fresh = request.num_tokens == request.num_prompt_tokens
        return is_fresh and parent.status is RequestStatus.RUNNING and parent.num_scheduled_tokens >= request.num_tokens

    def _find_hits(self, request: Request) -> list[int]:
        if not self._reads_cache(request):
            return []
        self._extend_digests(request, request.num_tokens // self._block_size)
        return self.pool.find_prefix(request.block_digests)

    def _count_chained(self, request: Request, num_shared: int) -> int:
        """Count the leading shared blocks that are the resident ones of their digests: a fork may share others too."""
        if not self._writes_cache(request):
            return 0
        self._extend_digests(request, request.num_tokens // self._block_size)
        resident = self.pool.find_prefix(request.block_digests[:num_shared])
        pairs = zip(resident, request.block_ids, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(resident))

    def _copy_tail(self, request: Request) -> tuple[int, int]:
        index = request.num_scheduled_tokens // self._block_size
        source, (copy,) = request.block_ids[index], self.pool.allocate(1)
        self.pool.release([source])
        self._replace(request, index, copy)
        return source, copy

    def _must_copy(self, request: Request) -> bool:
        """Whether the next token would be written into a block that is not the request's own: a fork's partial one."""
        position = request.num_scheduled_tokens
        if position < request.num_resident_tokens:
            return False
        return not self.pool.is_exclusive(request.block_ids[position // self._block_size])

    def _content(self, request: Request, index: int, parent: bytes | None) -> BlockContent | None:
        if request.cache.salt != self._told_salt:
            return None
        token_ids = request.token_ids[index * self._block_size : (index + 1) * self._block_size]
        return BlockContent(parent, array("I", token_ids).tobytes())

    def _replace(self, request: Request, index: int, block_id: int) -> None:
        request.block_ids[index] = block_id
        request.first_changed_block = min(request.first_changed_block, index)

    def _lead(self, request: Request) -> None:
        if self._reads_cache(request) and self._writes_cache(request):
            num_known = request.num_tokens // self._block_size
            self.in_progress.lead(request, request.block_digests[request.num_chained_blocks : num_known])

    def _reads_cache(self, request: Request) -> bool:
        return self._enable_prefix_caching and request.reads_cache

    def _writes_cache(self, request: Request) -> bool:
        return self._enable_prefix_caching and request.writes_cache and request.may_register

    def _extend_digests(self, request: Request, num_blocks: int) -> None:
        known = len(request.block_digests)
        if known < num_blocks:
            parent = request.block_digests[-1] if known else self._root_digest(request)
            ids = request.token_ids[known * self._block_size : num_blocks * self._block_size]
            request.block_digests += extend_digests(parent, ids, self._block_size, key=self._digest_key)

    def _root_digest(self, request: Request) -> bytes:
        return root_digest(self._contract, request.cache.salt, key=self._digest_key)
