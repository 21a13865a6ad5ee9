"""The router of the simulated fleet: the real choice over an index that learns late."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from itertools import count

from kvern.engine.block_hash import extend_digests, root_digest
from kvern.engine.block_pool import CacheEvent
from kvern.services.router.choice import Candidate, Policy, rank
from kvern.services.router.prefills import Prefill, Prefills


class LateIndex:
    """Which replica holds which block, as it was `lag_s` ago."""

    def __init__(self, lag_s: float) -> None:
        self._lag_s = lag_s
        self._holders: dict[bytes, set[int]] = {}
        self._coming: deque[tuple[float, int, list[CacheEvent]]] = deque()

    def record(self, replica: int, events: list[CacheEvent], now: float) -> None:
        if events:
            self._coming.append((now + self._lag_s, replica, events))

    def match(self, digests: Sequence[bytes], now: float) -> dict[int, int]:
        """Return how many leading blocks each replica holds. Those without the first are left out."""
        self._catch_up(now)
        matched: dict[int, int] = {}
        # What a replica holds is prefix-closed: it has all blocks before one that it has.
        for num_blocks, digest in enumerate(digests, start=1):
            holders = self._holders.get(digest)
            if not holders:
                break
            matched.update(dict.fromkeys(holders, num_blocks))
        return matched

    def _catch_up(self, now: float) -> None:
        while self._coming and self._coming[0][0] <= now:
            _, replica, events = self._coming.popleft()
            for digest, is_added, _ in events:
                if is_added:
                    self._holders.setdefault(digest, set()).add(replica)
                else:
                    self._holders[digest].remove(replica)
                    if not self._holders[digest]:
                        del self._holders[digest]


class FleetRouter:
    """Chooses a replica for each request, as the router's `Placement` does."""

    def __init__(
        self, num_replicas: int, policy: Policy, block_size: int, index_lag_s: float, seed: int, contract: str
    ) -> None:
        self._policy = policy
        self._block_size = block_size
        self._root = root_digest(contract)
        self._rng = random.Random(seed)
        self._index = LateIndex(index_lag_s)
        self._addresses = [f"{number:04}" for number in range(num_replicas)]
        self._num_requests = [0] * num_replicas
        self._now = 0.0
        self._prefills = [Prefills(lambda: self._now) for _ in range(num_replicas)]
        self._sent: dict[int, tuple[int, Prefill]] = {}
        """Where each request is."""
        self._turns = count()

    def choose(self, request_id: int, token_ids: Sequence[int], now: float) -> int:
        """Return the replica that a request goes to, and count it there."""
        self._now = now
        digests = extend_digests(self._root, token_ids, self._block_size) if self._policy is Policy.PREFIX else []
        joined = b"".join(digests)
        matched = self._index.match(digests, now)
        candidates = [
            self._candidate(replica, len(token_ids), joined, matched.get(replica, 0))
            for replica in range(len(self._addresses))
        ]
        best = rank(self._policy, candidates, self._rng, turn=next(self._turns))[0]
        replica = int(best.address)
        prefill = self._prefills[replica].begin(best.uncached_tokens, best.matched_tokens, joined)
        self._sent[request_id] = replica, prefill
        self._num_requests[replica] += 1
        return replica

    def learn(self, replica: int, events: list[CacheEvent], now: float) -> None:
        """Take in what became resident at a replica and what stopped to be."""
        self._index.record(replica, events, now)

    def start(self, request_id: int, now: float) -> None:
        """Take in that a request's first token has come."""
        self._now = now
        replica, prefill = self._sent[request_id]
        self._prefills[replica].compute(prefill)

    def end(self, request_id: int) -> None:
        """Take in that a request has ended."""
        replica, _ = self._sent.pop(request_id)
        self._num_requests[replica] -= 1

    def _candidate(self, replica: int, num_tokens: int, digests: bytes, num_indexed: int) -> Candidate:
        prefills = self._prefills[replica]
        num_blocks = prefills.num_blocks(digests, num_indexed)
        # The last token is computed in any case: the first output token is sampled from it.
        matched = min(num_blocks * self._block_size, num_tokens - 1)
        indexed = min(num_indexed * self._block_size, num_tokens - 1)
        return Candidate(
            self._addresses[replica],
            num_requests=self._num_requests[replica],
            matched_tokens=matched,
            uncached_tokens=num_tokens - matched,
            queued_tokens=max(0, prefills.num_tokens - (matched - indexed)),
        )
