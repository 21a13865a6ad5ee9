"""Which replica gets a request. Pure functions of what is known: no gRPC, no clock."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

QUEUE_WEIGHT = 0.2
"""Prompt tokens that a queued one counts for. The queue is waited for once; a prompt computed again takes the time of
all who come after it too, and the room of blocks that others would have found (bench/fleet.py)."""

DECODE_WEIGHT = 64.0
"""Prompt tokens that a request at a replica counts for: it takes part in each of the steps that are to come."""

SESSION_SLACK = 8 * DECODE_WEIGHT
"""By how much the replica that a session's id points at may be dearer than the cheapest one, in prompt tokens."""


class Policy(StrEnum):
    """How a replica is chosen."""

    PREFIX = "prefix"
    """The least to compute: prompt tokens not cached there, what is queued there, and its requests."""
    LEAST_LOADED = "least-loaded"
    """The same without regard to what is cached."""
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready replica as the choice sees it, for one prompt."""

    address: str
    num_requests: int
    """Requests running, waiting or on their way there."""
    matched_tokens: int = 0
    """Tokens of the prompt whose KV it holds, or is computing for another request."""
    uncached_tokens: int = 0
    """Tokens of the prompt that it would compute."""
    queued_tokens: int = 0
    """Prompt tokens of other requests that it computes first."""
    replica: str = ""
    """Its id."""
    load_age_s: float = 0.0
    """How long ago it last said what it has to do; this router's own requests are counted as of now."""

    @property
    def decode_cost(self) -> float:
        return DECODE_WEIGHT * self.num_requests

    @property
    def load_cost(self) -> float:
        """What it has to do without this request, in prompt tokens."""
        return QUEUE_WEIGHT * self.queued_tokens + self.decode_cost

    @property
    def cost(self) -> float:
        """What is to be done there before this prompt is computed, in prompt tokens."""
        return self.uncached_tokens + self.load_cost


def rank(
    policy: Policy, candidates: Iterable[Candidate], rng: random.Random, *, turn: int = 0, session_id: str = ""
) -> list[Candidate]:
    """Return the candidates, the one to take first. `turn` counts requests, for round-robin."""
    match policy:
        case Policy.PREFIX:
            return with_home_first(by_cost(candidates, rng), session_id)
        case Policy.LEAST_LOADED:
            return _by_load(candidates, rng)
        case Policy.ROUND_ROBIN:
            return _in_turn(candidates, turn)
        case Policy.RANDOM:
            return _shuffled(candidates, rng)


def by_cost(candidates: Iterable[Candidate], rng: random.Random) -> list[Candidate]:
    """Return the candidates, cheapest first; equals in random order, so that routers do not herd."""
    return sorted(_shuffled(candidates, rng), key=lambda candidate: candidate.cost)


def with_home_first(ranked: Sequence[Candidate], session_id: str) -> list[Candidate]:
    """Put the replica that the session's id points at first, if none has more of the prompt and it is not overloaded.

    ranked: cheapest first. The id points at the replica with the greatest hash of both (rendezvous hashing), so all
    routers agree, and when a replica comes or goes only sessions that point at it move.
    """
    if not session_id or not ranked:
        return list(ranked)
    home = max(ranked, key=lambda candidate: _rendezvous(session_id, candidate))
    knows_best = home.matched_tokens == max(candidate.matched_tokens for candidate in ranked)
    if not knows_best or home.cost > ranked[0].cost + SESSION_SLACK:
        return list(ranked)
    return [home, *(candidate for candidate in ranked if candidate is not home)]


def _by_load(candidates: Iterable[Candidate], rng: random.Random) -> list[Candidate]:
    return sorted(_shuffled(candidates, rng), key=lambda candidate: candidate.load_cost)


def _in_turn(candidates: Iterable[Candidate], turn: int) -> list[Candidate]:
    ordered = sorted(candidates, key=_identity)
    first = turn % max(1, len(ordered))
    return ordered[first:] + ordered[:first]


def _shuffled(candidates: Iterable[Candidate], rng: random.Random) -> list[Candidate]:
    shuffled = list(candidates)
    rng.shuffle(shuffled)
    return shuffled


def _identity(candidate: Candidate) -> str:
    return candidate.replica or candidate.address


def _rendezvous(session_id: str, candidate: Candidate) -> bytes:
    return hashlib.blake2b(f"{session_id}\0{_identity(candidate)}".encode(), digest_size=8).digest()
