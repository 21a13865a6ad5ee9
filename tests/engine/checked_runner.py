"""A lazy device with a KV memory that can be checked: each slot remembers the tokens up to the one it was written for.

A step executes when its result is asked for, in order, with what the host knew when it was submitted; a token drawn by
the step before is read on the device, and exists nowhere until then. What grammars allow is read when the next step is
submitted, as the real runner does. The next token depends on all tokens so far, read through the block table, so a
wrong block, one freed too early, or a slot written twice changes the output or raises.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvern.engine.plan import DrawError, Plan, PlanEntry, PromptLogprobs, SampledTokens
from kvern.engine.request import GrammarState, SamplingParams

from .plain_model import VOCAB_SIZE, draw, logprobs_of, scores


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
    num_prompt_tokens: int
    sampling: SamplingParams
    grammar: GrammarState | None
    prompt_start: int | None
    """First position whose prediction of a prompt token is told. None: none is."""


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
        self._last: LazyStep | None = None
        self._num_submitted = 0
        self._tables: dict[int, list[int]] = {}

    def submit(self, plan: Plan) -> LazyStep:
        if self._last is not None:
            self._last.finish()
        for request_id in plan.removed_ids:
            self._tables.pop(request_id, None)
        assert len({entry.request.request_id for entry in plan.entries}) == len(plan.entries)
        self.max_entries = max(self.max_entries, len(plan.entries))
        self.num_computed_tokens += plan.num_tokens
        self.num_copies += len(plan.block_copies)
        step = LazyStep(self, self._num_submitted, [self._row(entry) for entry in plan.entries], plan.block_copies)
        self._num_submitted += 1
        self._last = step
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
            request.num_prompt_tokens,
            request.sampling,
            request.grammar if entry.samples else None,
            max(entry.start, request.num_prompt_logprobs) if request.prompt_logprobs is not None else None,
        )


class LazyStep:
    def __init__(self, device: CheckedRunner, number: int, rows: list[Row], copies: list[tuple[int, int]]) -> None:
        self._device = device
        self._number = number
        self._rows = rows
        self._copies = copies
        self._masks: list[list[bool] | None] | None = None

    def finish(self) -> None:
        """Read what the grammars allow, unless that is done."""
        if self._masks is None:
            self._masks = [None if row.grammar is None else _mask(row.grammar) for row in self._rows]

    def result(self) -> SampledTokens:
        self.finish()
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
        assert self._masks is not None
        sampled = SampledTokens([None] * len(self._rows))
        for entry, each in enumerate(zip(self._rows, truths, self._masks, strict=True)):
            self._read(entry, *each, sampled)
        return sampled

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

    def _read(
        self, entry: int, row: Row, truth: tuple[int, ...], allowed: list[bool] | None, sampled: SampledTokens
    ) -> None:
        if row.request_id in self._device.poisoned:
            self._device.last_sampled.pop(row.request_id, None)
            sampled.errors[entry] = DrawError("logits are not numbers", is_corrupt=True)
            return
        for position in range(row.end):
            held = self._device.slots[self._slot(row, position)]
            assert held == truth[: position + 1], "a block holds another prompt's KV"
        prompt_logprobs = _predict_prompt(row)
        if prompt_logprobs is not None:
            sampled.prompt_logprobs[entry] = prompt_logprobs
        if not row.samples:
            return
        token_id, logprobs = draw(truth, row.num_prompt_tokens, row.sampling, allowed)
        self._device.last_sampled[row.request_id] = sampled.token_ids[entry] = token_id
        if row.sampling.logprobs is not None:
            sampled.logprobs[entry] = logprobs


def _mask(grammar: GrammarState) -> list[bool]:
    words = np.empty(-(-VOCAB_SIZE // 32), dtype=np.int32)
    grammar.fill(words, may_end=True)
    bits: list[bool] = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB_SIZE].astype(bool).tolist()
    return bits


def _predict_prompt(row: Row) -> PromptLogprobs | None:
    end = min(row.end, row.num_prompt_tokens - 1)
    if row.prompt_start is None or row.prompt_start >= end:
        return None
    positions = range(row.prompt_start + 1, end + 1)
    known = row.known_token_ids
    items = [logprobs_of(scores(known[:position]), known[position]) for position in positions]
    return PromptLogprobs(row.request_id, positions.start, items)
