"""A runner with a KV memory that can be checked: each slot remembers which token it was written for, after which ones.

The plain model: the next token is a hash of all tokens so far. A step reads those tokens through the block table, so a
wrong block, a block freed too early or a slot written twice changes the output or raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from kvern.engine.plan import Plan, SampledToken
from kvern.engine.request import Request

VOCAB_SIZE = 50


def next_token(token_ids: Sequence[int]) -> int:
    return crc32(bytes(str(list(token_ids)), "ascii")) % VOCAB_SIZE


def expected_output(prompt: Sequence[int], max_tokens: int, stop_token_ids: frozenset[int] = frozenset()) -> list[int]:
    token_ids = list(prompt)
    while len(token_ids) - len(prompt) < max_tokens:
        token_ids.append(next_token(token_ids))
        if token_ids[-1] in stop_token_ids:
            break
    return token_ids[len(prompt) :]


class Submission:
    def __init__(self, sampled: list[SampledToken]) -> None:
        self._sampled = sampled

    def result(self) -> list[SampledToken]:
        return self._sampled


class CheckedRunner:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_computed_tokens = 0
        self.max_entries = 0
        self._block_size = block_size
        self._slots: list[tuple[int, ...] | None] = [None] * (num_blocks * block_size)
        self._tables: dict[int, list[int]] = {}

    def submit(self, plan: Plan) -> Submission:
        for request_id in plan.removed_ids:
            self._tables.pop(request_id, None)
        assert len({entry.request.request_id for entry in plan.entries}) == len(plan.entries)
        self.max_entries = max(self.max_entries, len(plan.entries))
        for entry in plan.entries:
            self._copy_table(entry.request)
        for entry in plan.entries:
            self._write(entry.request, entry.start, entry.start + entry.num_tokens)
        return Submission([self._read(entry.request, entry.start + entry.num_tokens) for entry in plan.entries])

    def _copy_table(self, request: Request) -> None:
        """Copy only what the scheduler says has changed, as the persistent batch does."""
        table = self._tables.setdefault(request.request_id, [])
        del table[request.first_changed_block :]
        table += request.block_ids[len(table) :]
        request.first_changed_block = len(request.block_ids)
        assert table == request.block_ids

    def _slot(self, request: Request, position: int) -> int:
        block = self._tables[request.request_id][position // self._block_size]
        return block * self._block_size + position % self._block_size

    def _write(self, request: Request, start: int, end: int) -> None:
        self.num_computed_tokens += end - start
        for position in range(max(start, request.num_resident_tokens), end):
            self._slots[self._slot(request, position)] = tuple(request.token_ids[: position + 1])

    def _read(self, request: Request, end: int) -> SampledToken:
        for position in range(end):
            held = self._slots[self._slot(request, position)]
            assert held == tuple(request.token_ids[: position + 1]), "a block holds another prompt's KV"
        return SampledToken(next_token(request.token_ids) if end == request.num_tokens else None)
