"""A model, a sampler and a grammar in plain Python: what an output must be, whatever the engine did on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from kvern.engine.plan import TokenLogprobs
from kvern.engine.request import SamplingParams

VOCAB_SIZE = 50
END_TOKEN_ID = VOCAB_SIZE - 1


def scores(token_ids: Sequence[int]) -> list[int]:
    """Return how likely each token is to come next: depends on all tokens so far."""
    state = crc32(str(list(token_ids)).encode())
    return [(state ^ token_id * 0x9E3779B1) * 0x85EBCA6B >> 9 & 0xFFFF for token_id in range(VOCAB_SIZE)]


def logprobs_of(raw: Sequence[int], token_id: int) -> TokenLogprobs:
    """Return what is told of a token: here its score stands for the logarithm."""
    rank = 1 + sum((score, -other) > (raw[token_id], -token_id) for other, score in enumerate(raw))
    return TokenLogprobs(raw[token_id], rank)


def draw(
    token_ids: Sequence[int], num_prompt_tokens: int, sampling: SamplingParams, allowed: Sequence[bool] | None = None
) -> tuple[int, TokenLogprobs]:
    """Return the next token and what is told of it. `allowed`: what a grammar allows."""
    raw = scores(token_ids)
    output = token_ids[num_prompt_tokens:]
    penalized = [
        score - 20_000 * sampling.frequency_penalty * output.count(token_id) for token_id, score in enumerate(raw)
    ]
    candidates = [token_id for token_id in range(VOCAB_SIZE) if allowed is None or allowed[token_id]]
    token_id = max(candidates, key=lambda candidate: (penalized[candidate], -candidate))
    return token_id, logprobs_of(raw, token_id)


@dataclass
class PlainGrammar:
    """Allows a third of the tokens, which third depends on those so far; then the end. Implements `GrammarState`."""

    num_tokens: int
    """How many tokens a match has before its end."""
    state: int = 0
    count: int = 0
    error: str = ""

    def allowed(self) -> list[bool]:
        if self.count >= self.num_tokens:
            return [token_id == END_TOKEN_ID for token_id in range(VOCAB_SIZE)]
        return [token_id % 3 == self.state % 3 and token_id != END_TOKEN_ID for token_id in range(VOCAB_SIZE)]

    def advance(self, token_id: int) -> bool:
        if self.count > self.num_tokens or not self.allowed()[token_id]:
            self.error = f"token {token_id} after {self.count}"
            return False
        self.state += token_id + 1
        self.count += 1
        return True

    def fill(self, row: NDArray[np.int32], *, may_end: bool) -> None:
        bits = np.zeros(32 * len(row), dtype=bool)
        bits[:VOCAB_SIZE] = self.allowed()
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)


def expected_output(
    prompt: Sequence[int],
    max_tokens: int,
    stop_token_ids: frozenset[int] = frozenset(),
    *,
    sampling: SamplingParams | None = None,
    grammar: PlainGrammar | None = None,
) -> list[int]:
    """Return the tokens of a request that runs alone, from start to end."""
    sampling = sampling or SamplingParams()
    token_ids = list(prompt)
    while len(token_ids) - len(prompt) < max_tokens:
        allowed = None if grammar is None else grammar.allowed()
        token_id, _ = draw(token_ids, len(prompt), sampling, allowed)
        token_ids.append(token_id)
        if grammar is not None:
            grammar.advance(token_id)
        if token_id in stop_token_ids:
            break
    return token_ids[len(prompt) :]
