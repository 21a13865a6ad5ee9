"""Which replica gets a request. Pure functions of what is known: no gRPC, no clock."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready replica as the choice sees it."""

    address: str
    num_requests: int
    """Requests running, waiting or on their way there."""
    matched_tokens: int = 0
    """Tokens of the prompt whose KV it is known to hold."""

    @property
    def cost(self) -> float:
        return float(self.num_requests)


def by_cost(candidates: Iterable[Candidate], rng: random.Random) -> list[Candidate]:
    """Return the candidates, cheapest first; equals in random order, so that routers do not herd."""
    shuffled = list(candidates)
    rng.shuffle(shuffled)
    return sorted(shuffled, key=lambda candidate: candidate.cost)
