"""Where a request may go: what is known of its prompt at each replica, and which one that makes the first choice."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Protocol

from kvern.services.router.choice import Candidate, Policy, rank
from kvern.services.router.convert import reads_cache, writes_cache
from kvern.services.router.models import Contract, contracts_of
from kvern.services.router.prefills import DIGEST_BYTES, Prefill, Prefills
from kvern.services.router.replica import Replica
from kvern.services.router.replica_table import ReplicaTable
from kvern.services.runtime.errors import Unavailable
from kvern.services.runtime.tracing import Kind, current_span
from kvern.v1 import inference_pb2, replica_pb2

Digests = Mapping[Contract, bytes]
"""A prompt's block digests under each contract, joined."""

Choice = Callable[[Sequence[Candidate]], list[Candidate]]
"""Puts candidates in order, best first."""


class PrefixIndex(Protocol):
    """What tells which replica holds how long a prefix."""

    async def match(self, model: str, contract: str, digests: bytes, budget_s: float) -> dict[str, int]:
        """Return how many leading blocks each replica holds, by the index's name for it. Never raises, and takes no
        longer than `budget_s`: what is not known by then is left out."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the choice sees it."""

    num_tokens: int
    digests: Digests
    matches: Mapping[Contract, Mapping[str, int]]
    """Blocks that each replica of a contract holds, by the index's name for it."""
    is_stored: bool
    """Whether it leaves blocks behind for others."""

    def tokens(self, num_blocks: int, block_size: int) -> int:
        """Return how many tokens need not be computed where its first blocks are cached.

        The last one is computed in any case: the first output token is sampled from it.
        """
        return min(num_blocks * block_size, self.num_tokens - 1)


class Placer:
    """Looks up who holds a prompt's beginning, and places requests by one policy."""

    def __init__(
        self, table: ReplicaTable, index: PrefixIndex | None, policy: Policy, budget_s: float, rng: random.Random
    ) -> None:
        """budget_s: most seconds to wait for the index."""
        self.policy = policy
        self._table = table
        self._index = index
        self._budget_s = budget_s
        self._rng = rng
        self._turns = count()

    def contracts(self, request: inference_pb2.GenerateRequest, model: str) -> list[Contract]:
        """Return the contracts under which to hash a request's prompt: none where nobody would ask the index."""
        if self._index is None or self.policy is not Policy.PREFIX or not reads_cache(request):
            return []
        return contracts_of(self._table, model)

    async def place(
        self,
        request: inference_pb2.GenerateRequest,
        model: str,
        num_tokens: int,
        digests: Digests,
        time_remaining_s: float | None,
    ) -> Placement:
        """Ask the index once, for all contracts at a time, and return where the request may go."""
        budget_s = self._budget_s if time_remaining_s is None else min(self._budget_s, time_remaining_s)
        matches = {} if self._index is None else await _look_up(self._index, model, digests, budget_s)
        prompt = Prompt(num_tokens, digests, matches, writes_cache(request))
        choice = partial(rank, self.policy, rng=self._rng, turn=next(self._turns), session_id=request.session_id)
        return Placement(self._table, model, prompt, self.policy, choice)


class Placement:
    """Where one request may go, and where it went."""

    def __init__(self, table: ReplicaTable, model: str, prompt: Prompt, policy: Policy, choice: Choice) -> None:
        self.model = model
        self._table = table
        self._prompt = prompt
        self._policy = policy
        self._choice = choice
        self._sent: dict[str, Sent] = {}

    def ranked(self, without: Set[str] = frozenset()) -> list[Candidate]:
        """Return who can take it, best first, addresses in `without` left out. Raises Unavailable if nobody can."""
        replicas = self._table.ready(self.model, without)
        if not replicas:
            raise Unavailable(f"no replica of {self.model!r} is ready")
        return self._choice([_candidate(replica, self._prompt) for replica in replicas])

    @contextmanager
    def sending(self, candidate: Candidate) -> Iterator[Sent]:
        """Count the request as sent to a replica, until the block ends."""
        replica = self._table[candidate.address]
        digests = self._prompt.digests.get(_contract(replica), b"") if self._prompt.is_stored else b""
        prefills = replica.prefills
        prefill = prefills.begin(candidate.uncached_tokens, candidate.matched_tokens, digests)
        sent = self._sent[candidate.address] = Sent(candidate, prefills, prefill)
        try:
            yield sent
        finally:
            prefills.drop(prefill)

    def sent_to(self, address: str) -> Sent | None:
        """Return what came of the request at a replica, None if it was not sent there."""
        return self._sent.get(address)

    def predicted_tokens(self, address: str) -> int | None:
        """Return how many tokens were expected to be cached where it was sent; None where the index was not asked."""
        sent = self.sent_to(address)
        return None if sent is None or not self._prompt.digests else sent.candidate.matched_tokens

    def metadata(self, address: str) -> Sequence[tuple[str, str]]:
        """Explain why a replica was chosen, in less than 1 KiB."""
        sent = self.sent_to(address)
        if sent is None:
            return ()
        candidate = sent.candidate
        cost = f"uncached={candidate.uncached_tokens} queued={candidate.queued_tokens} decode={candidate.decode_cost:g}"
        return (
            ("kvern-policy", self._policy),
            ("kvern-matched-tokens", str(candidate.matched_tokens)),
            ("kvern-cost", cost),
            ("kvern-load-age-s", f"{candidate.load_age_s:.3f}"),
        )


class Sent:
    """A request at one replica. Give it each message until `is_computed`."""

    def __init__(self, candidate: Candidate, prefills: Prefills, prefill: Prefill) -> None:
        self.candidate = candidate
        """How the replica looked when it was chosen."""
        self.is_computed = False
        """Whether its first token has come."""
        self.cached_tokens: int | None = None
        """Prompt tokens that were cached there, once the replica has said so."""
        self._prefills = prefills
        self._prefill = prefill

    def take(self, response: replica_pb2.ServeResponse) -> None:
        if response.HasField("cached_tokens"):
            self.cached_tokens = response.cached_tokens
            self._prefills.schedule(self._prefill)
        if response.updates:
            self.is_computed = True
            self._prefills.compute(self._prefill)


async def _look_up(index: PrefixIndex, model: str, digests: Digests, budget_s: float) -> dict[Contract, dict[str, int]]:
    hashed = [contract for contract, joined in digests.items() if joined]
    if not hashed:
        return {}
    with current_span().child("index lookup", Kind.CLIENT) as span:
        found = await asyncio.gather(
            *(index.match(model, contract.fingerprint, digests[contract], budget_s) for contract in hashed)
        )
        if span.is_recording:
            span.set(
                {
                    "db.system.name": "redis",
                    "kvern.num_digests": sum(len(digests[contract]) // DIGEST_BYTES for contract in hashed),
                    "kvern.matched_blocks": max((max(each.values(), default=0) for each in found), default=0),
                }
            )
    return dict(zip(hashed, found, strict=True))


def _contract(replica: Replica) -> Contract:
    engine = replica.engine
    return Contract("", 0) if engine is None else Contract(engine.contract, engine.block_size)


def _candidate(replica: Replica, prompt: Prompt) -> Candidate:
    contract = _contract(replica)
    num_indexed = prompt.matches.get(contract, {}).get(replica.index_id, 0)
    num_blocks = replica.prefills.num_blocks(prompt.digests.get(contract, b""), num_indexed)
    indexed, matched = (prompt.tokens(blocks, contract.block_size) for blocks in (num_indexed, num_blocks))
    candidate = replica.candidate
    return replace(
        candidate,
        matched_tokens=matched,
        uncached_tokens=prompt.num_tokens - matched,
        # What others are computing of this very prompt is no work that it waits for: elsewhere it would be its own.
        queued_tokens=max(0, candidate.queued_tokens - (matched - indexed)),
        load_age_s=time.monotonic() - replica.loaded_at,
    )
