"""What the simulated fleet is asked: the requests of a trace, or of synthetic tenants."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

HASH_TOKENS = 512
"""Tokens that one of a trace's hash ids stands for."""

_MIN_TENANT_BLOCKS, _MAX_TENANT_BLOCKS = 2, 12
_MAX_CONVERSATION_BLOCKS = 40
_NEW_CONVERSATION_SHARE = 0.3
_MAX_TURN_BLOCKS = 3
_MAX_OUTPUT_TOKENS = 300


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to the fleet."""

    arrival_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    """One for each HASH_TOKENS tokens of the prompt, the last of which may be fewer. Equal ids are equal tokens."""

    @property
    def token_ids(self) -> list[int]:
        """The prompt: every token of a piece is the piece's hash id."""
        ids: list[int] = []
        for hash_id in self.hash_ids:
            ids += [hash_id] * HASH_TOKENS
        return ids[: self.input_length]


def read_trace(trace: Path, count: int | None, speed: float) -> list[Arrival]:
    """Read the first `count` requests of a trace, or all.

    trace: JSON lines with timestamp (ms), input_length and output_length (tokens), and hash_ids (one for 512 tokens).
    speed: how many times as fast as they came they come.
    """
    with trace.open() as lines:
        items = [json.loads(line) for line in islice(lines, count)]
    return [
        Arrival(
            item["timestamp"] / 1000 / speed, item["input_length"], max(1, item["output_length"]), (*item["hash_ids"],)
        )
        for item in items
    ]


def tenant_requests(num_tenants: int, count: int, rate: float, seed: int) -> list[Arrival]:
    """Return requests of tenants with a system prompt each, whose users' conversations grow turn by turn.

    Tenant n is asked 1/n times as often as the first. Arrivals are a Poisson process of `rate` a second.
    """
    rng = random.Random(seed)
    hash_ids = iter(range(2**31))
    tenants = [_Tenant(rng, hash_ids) for _ in range(num_tenants)]
    weights = [1 / (rank + 1) for rank in range(num_tenants)]
    arrivals, now = [], 0.0
    for tenant in rng.choices(tenants, weights, k=count):
        now += rng.expovariate(rate)
        conversation = tenant.next_turn()
        input_length = (len(conversation) - 1) * HASH_TOKENS + rng.randint(1, HASH_TOKENS)
        arrivals.append(Arrival(now, input_length, rng.randint(1, _MAX_OUTPUT_TOKENS), conversation))
    return arrivals


class _Tenant:
    def __init__(self, rng: random.Random, hash_ids: Iterator[int]) -> None:
        self._rng = rng
        self._hash_ids = hash_ids
        self._prompt = self._new_blocks(rng.randint(_MIN_TENANT_BLOCKS, _MAX_TENANT_BLOCKS))
        self._conversations: list[tuple[int, ...]] = []

    def next_turn(self) -> tuple[int, ...]:
        """Return the hash ids of a conversation that begins or goes on. Its last piece is this turn's alone."""
        history = self._prompt
        if self._conversations and self._rng.random() > _NEW_CONVERSATION_SHARE:
            history = self._conversations.pop(self._rng.randrange(len(self._conversations)))
        turn = history + self._new_blocks(self._rng.randint(1, _MAX_TURN_BLOCKS))
        if len(turn) < _MAX_CONVERSATION_BLOCKS:
            self._conversations.append(turn)
        return turn + self._new_blocks(1)

    def _new_blocks(self, count: int) -> tuple[int, ...]:
        return tuple(islice(self._hash_ids, count))
