"""A lazy device with a KV memory that can be checked: each slot remembers the tokens up to the one it was written for.

A step executes when its result is asked for, in order, with what the host knew when it was submitted; a token drawn by
the step before is read on the device. The plain model: the next token is a hash of all tokens so far, read through the
block table, so a wrong block, one freed too early, or a slot written twice changes the output or raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from kvern.engine.plan import Plan, PlanEntry, SampledToken

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


@dataclass(frozen=True)
class Row:
    """A plan entry as the device sees it."""

    request_id: int
    start: int
    end: int
    num_resident_tokens: int
    samples: bool
    known_token_ids: tuple[int, ...]
    table: tuple[int, ...]


class CheckedRunner:
    def __init__(self, num_blocks: int, block_size: int, *, poisoned: frozenset[int] = frozenset()) -> None:
        """poisoned: request ids whose logits are not numbers."""
        self.num_computed_tokens = 0
        self.max_entries = 0
        self.num_copies = 0
        self.block_size = block_size
        self.slots: list[tuple[int, ...] | None] = [None] * (num_blocks * block_size)
        self.last_sampled: dict[int, int] = {}
        self.num_executed = 0
        self.poisoned = set(poisoned)
        self._num_submitted = 0
        self._tables: dict[int, list[int]] = {}

    def submit(self, plan: Plan) -> LazyStep:
        for request_id in plan.removed_ids:
            self._tables.pop(request_id, None)
        assert len({entry.request.request_id for entry in plan.entries}) == len(plan.entries)
        self.max_entries = max(self.max_entries, len(plan.entries))
        self.num_computed_tokens += plan.num_tokens
        self.num_copies += len(plan.block_copies)
        step = LazyStep(self, self._num_submitted, [self._row(entry) for entry in plan.entries], plan.block_copies)
        self._num_submitted += 1
        return step

    def _row(self, entry: PlanEntry) -> Row:
        request = entry.request
        table = self._tables.setdefault(request.request_id, [])
        # Only what the scheduler says has changed is copied, as the persistent batch does.
        del table[request.first_changed_block :]
        table += request.block_ids[len(table) :]
        request.first_changed_block = len(request.block_ids)
        assert table == request.block_ids
        assert entry.end <= request.num_tokens + 1
        return Row(
            request.request_id,
            entry.start,
            entry.end,
            request.num_resident_tokens,
            entry.samples,
            tuple(request.token_ids),
            tuple(table),
        )


class LazyStep:
    def __init__(self, device: CheckedRunner, number: int, rows: list[Row], copies: list[tuple[int, int]]) -> None:
        self._device = device
        self._number = number
        self._rows = rows
        self._copies = copies

    def result(self) -> list[SampledToken]:
        device, size = self._device, self._device.block_size
        assert self._number == device.num_executed, "steps execute in order"
        device.num_executed += 1
        for source, destination in self._copies:
            device.slots[destination * size : (destination + 1) * size] = device.slots[
                source * size : (source + 1) * size
            ]
        truths = [self._truth(row) for row in self._rows]
        for row, truth in zip(self._rows, truths, strict=True):
            self._write(row, truth)
        return [self._read(row, truth) for row, truth in zip(self._rows, truths, strict=True)]

    def _truth(self, row: Row) -> tuple[int, ...]:
        if row.end <= len(row.known_token_ids):
            return row.known_token_ids[: row.end]
        # After logits that were no numbers, a row in flight goes on with some token: nobody will take its result.
        return (*row.known_token_ids, self._device.last_sampled.get(row.request_id, -1))

    def _slot(self, row: Row, position: int) -> int:
        size = self._device.block_size
        return row.table[position // size] * size + position % size

    def _write(self, row: Row, truth: tuple[int, ...]) -> None:
        for position in range(max(row.start, row.num_resident_tokens), row.end):
            self._device.slots[self._slot(row, position)] = truth[: position + 1]

    def _read(self, row: Row, truth: tuple[int, ...]) -> SampledToken:
        if row.request_id in self._device.poisoned:
            self._device.last_sampled.pop(row.request_id, None)
            return SampledToken(None, error="logits are not numbers")
        for position in range(row.end):
            held = self._device.slots[self._slot(row, position)]
            assert held == truth[: position + 1], "a block holds another prompt's KV"
        if not row.samples:
            return SampledToken(None)
        self._device.last_sampled[row.request_id] = next_token(truth)
        return SampledToken(next_token(truth))
