"""The persistent batch: what the device knows of the running requests from one step to the next.

Each running request has a slot, a row in tensors that live as long as the runner. A step writes only what changed: all
of a new request, the block ids that a request gained or that were exchanged, and the token it was last given. So a
sampled token goes into the next step on the device, whether or not the host has seen it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kvern.engine.device_copy import PinnedRing
from kvern.engine.plan import Plan, PlanEntry
from kvern.engine.request import Request
from kvern.engine.sampling_state import SampledRows, SamplingInputs, SamplingState


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Tokens of one entry that predict prompt tokens whose log-probabilities are told."""

    entry: int
    request_id: int
    start: int
    """Position of the first predicted token."""
    rows: slice
    """Rows of the step's tokens."""
    token_ids: Tensor
    """[num_rows] int64, the predicted tokens."""
    num_top: int
    """How many alternatives are told."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as the host knows it."""

    entries: list[list[int]]
    """Of each entry: its slot, how many tokens run, how many the context then has, how many are in the cache."""
    sampled: SampledRows
    prompts: list[PromptRows]

    @property
    def num_tokens(self) -> int:
        return sum(self.entries[1])

    @property
    def longest_context(self) -> int:
        return max(self.entries[2])

    @property
    def is_decode(self) -> bool:
        """Whether every entry is one token."""
        return self.num_tokens == len(self.entries[1])


@dataclass(frozen=True, slots=True)
class StepLayout:
    """One step as the model sees it, on the device: all entries' tokens one after another."""

    token_ids: Tensor
    """[num_tokens] int32."""
    positions: Tensor
    """[num_tokens] int64."""
    slot_mapping: Tensor
    """[num_tokens] int64, -1 where the KV is in the cache already."""
    block_table: Tensor
    """[num_entries, most blocks of any] int32."""
    cu_query_lens: Tensor
    """[num_entries + 1] int32."""
    context_lens: Tensor
    """[num_entries] int32, tokens including this step's. 0: the entry fills up the batch."""
    is_padding: Tensor
    """[num_tokens] bool, those of such entries."""


PADDING_SLOT = -1
"""The last row of the batch's tensors, which no request has."""


class PersistentBatch:
    """Slots, and the tensors that they are rows of."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        ring: PinnedRing,
    ) -> None:
        self._block_size = block_size
        self._ring = ring
        self._slots: dict[int, int] = {}
        self._free_slots = list(range(max_num_seqs))
        max_blocks = -(-max_model_len // block_size)
        # One column beyond the longest request, for a token that is sampled and then not wanted, and one row more than
        # there are slots, for what fills up a batch.
        self.token_ids = self._zeros(max_num_seqs + 1, max_model_len + 1, dtype=torch.int32)
        self._block_table = self._zeros(max_num_seqs + 1, max_blocks, dtype=torch.int32)
        self._block_changes: list[tuple[int, int, int]] = []
        """Slot, index and id of blocks that the device does not know so far."""
        self.sampling = SamplingState(self.token_ids, vocab_size, eos_token_ids, ring)

    @property
    def table_shape(self) -> tuple[int, int]:
        """Most entries of a step, one that fills it up included, and most blocks of any."""
        num_rows, num_blocks = self._block_table.shape
        return num_rows, num_blocks

    def prepare(self, plan: Plan) -> StepInputs:
        """Take in what the plan changed. The plan must have entries."""
        self.forget(plan.removed_ids)
        slots = [self._slot_of(entry.request) for entry in plan.entries]
        self._copy_blocks()
        return StepInputs(
            entries=[
                slots,
                [entry.num_tokens for entry in plan.entries],
                [entry.end for entry in plan.entries],
                [entry.request.num_resident_tokens for entry in plan.entries],
            ],
            sampled=_find_sampled(plan.entries, slots),
            prompts=self._select_prompts(plan.entries, slots),
        )

    def lay_out(self, entries: Tensor, num_tokens: int, num_blocks: int) -> StepLayout:
        """Lay out a step on the device, which the host does not wait for.

        entries: [4, num_entries] int64, as in StepInputs; num_tokens: of all; num_blocks: most that any context has.
        """
        slot, count, end, num_resident = entries
        query_ends = count.cumsum(0)
        entry = torch.repeat_interleave(count, output_size=num_tokens)
        positions = torch.arange(num_tokens, device=self._ring.device) + (end - query_ends)[entry]
        positions = positions.clamp_(min=0)  # of padding, whose context ends at 0
        token_slots = slot[entry]
        blocks = self._block_table[token_slots, positions // self._block_size].long()
        slot_mapping = blocks * self._block_size + positions % self._block_size
        return StepLayout(
            token_ids=self.token_ids[token_slots, positions],
            positions=positions,
            slot_mapping=slot_mapping.masked_fill_(positions < num_resident[entry], -1),
            block_table=self._block_table[slot, :num_blocks],
            cu_query_lens=torch.cat((query_ends.new_zeros(1), query_ends)).to(torch.int32),
            context_lens=end.to(torch.int32),
            is_padding=(end == 0)[entry],
        )

    def forget(self, request_ids: list[int]) -> None:
        """Free the slots of requests that no longer run. Those that never had one are ignored."""
        for request_id in request_ids:
            slot = self._slots.pop(request_id, None)
            if slot is not None:
                self._free_slots.append(slot)
                self.sampling.forget(slot)

    def append(self, sampling: SamplingInputs, token_ids: Tensor) -> None:
        """Take in the tokens sampled for a step: [num_sampled] int64."""
        self.token_ids[sampling.slots, sampling.positions] = token_ids.to(torch.int32)
        self.sampling.count(sampling, token_ids)

    def _slot_of(self, request: Request) -> int:
        slot = self._slots.get(request.request_id)
        if slot is None:
            return self._add(request)
        if request.first_changed_block < len(request.block_ids):
            self._note_blocks(slot, request)
        return slot

    def _add(self, request: Request) -> int:
        if not self._free_slots:
            raise RuntimeError(f"request {request.request_id}: more requests run than there are slots")
        slot = self._slots[request.request_id] = self._free_slots.pop()
        self._ring.copy(torch.tensor(request.token_ids, dtype=torch.int32), self.token_ids[slot])
        self.sampling.add(slot, request)
        request.first_changed_block = 0
        self._note_blocks(slot, request)
        return slot

    def _note_blocks(self, slot: int, request: Request) -> None:
        """Note the block ids that are news."""
        first = request.first_changed_block
        news = enumerate(request.block_ids[first:], start=first)
        self._block_changes += [(slot, index, block_id) for index, block_id in news]
        request.first_changed_block = len(request.block_ids)

    def _copy_blocks(self) -> None:
        """Copy what was noted, in one piece."""
        if self._block_changes:
            slots, indices, block_ids = self._ring.to_device(self._block_changes).unbind(1)
            self._block_table[slots, indices] = block_ids.to(torch.int32)
            self._block_changes.clear()

    def _select_prompts(self, entries: Sequence[PlanEntry], slots: Sequence[int]) -> list[PromptRows]:
        row_ends = accumulate(entry.num_tokens for entry in entries)
        prompts = []
        for index, (entry, slot, row_end) in enumerate(zip(entries, slots, row_ends, strict=True)):
            request = entry.request
            # What was told already is not told again: this one was preempted.
            first = max(entry.start, request.num_prompt_logprobs)
            end = min(entry.end, request.num_prompt_tokens - 1)
            if request.prompt_logprobs is not None and first < end:
                rows = slice(row_end - entry.end + first, row_end - entry.end + end)
                token_ids = self.token_ids[slot, first + 1 : end + 1].long()
                prompts.append(
                    PromptRows(index, request.request_id, first + 1, rows, token_ids, request.prompt_logprobs)
                )
        return prompts

    def _zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._ring.device)


def _find_sampled(entries: Sequence[PlanEntry], slots: Sequence[int]) -> SampledRows:
    last_rows = [row_end - 1 for row_end in accumulate(entry.num_tokens for entry in entries)]
    sampled = [index for index, entry in enumerate(entries) if entry.samples]
    return SampledRows(
        requests=[entries[index].request for index in sampled],
        rows=[last_rows[index] for index in sampled],
        slots=[slots[index] for index in sampled],
        positions=[entries[index].end for index in sampled],
    )
