"""The persistent batch: what the device knows of the running requests from one step to the next.

Each running request has a slot, a row in tensors that live as long as the runner. A step writes only what changed: all
of a new request, the block ids that a request gained or that were exchanged, and the token it was last given. So a
sampled token goes into the next step on the device, whether or not the host has seen it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvern.engine.plan import Plan, PlanEntry
from kvern.engine.request import Request
from kvern.engine.sampler import RandomRows


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as the model sees it: all entries' tokens one after another."""

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
    """[num_entries] int32, tokens including this step's."""
    sampled_rows: Tensor
    """[num_sampled] int64, the last token of each entry that samples."""
    sampled_slots: Tensor
    """[num_sampled] int64."""
    sampled_positions: Tensor
    """[num_sampled] int64, where the new tokens go."""
    random: RandomRows | None
    """The sampled rows that are drawn. None: all are greedy."""


class PersistentBatch:
    """Slots, and the tensors that they are rows of."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._slots: dict[int, int] = {}
        self._free_slots = list(range(max_num_seqs))
        max_blocks = -(-max_model_len // block_size)
        # One column beyond the longest request, for a token that is sampled and then not wanted.
        self._token_ids = self._zeros(max_num_seqs, max_model_len + 1, dtype=torch.int32)
        self._block_table = self._zeros(max_num_seqs, max_blocks, dtype=torch.int32)
        self._num_prompt_tokens = self._zeros(max_num_seqs, dtype=torch.int64)
        self._temperature = self._zeros(max_num_seqs, dtype=torch.float32)
        self._top_k = self._zeros(max_num_seqs, dtype=torch.int64)
        self._top_p = self._zeros(max_num_seqs, dtype=torch.float64)
        self._seed = self._zeros(max_num_seqs, dtype=torch.int64)
        self._choice = self._zeros(max_num_seqs, dtype=torch.int64)

    def prepare(self, plan: Plan) -> StepInputs:
        """Take in what the plan changed, and lay out its step. The plan must have entries."""
        self.forget(plan.removed_ids)
        slots = [self._slot_of(entry.request) for entry in plan.entries]
        return self._lay_out(plan.entries, slots)

    def forget(self, request_ids: list[int]) -> None:
        """Free the slots of requests that no longer run. Those that never had one are ignored."""
        for request_id in request_ids:
            slot = self._slots.pop(request_id, None)
            if slot is not None:
                self._free_slots.append(slot)

    def append(self, inputs: StepInputs, token_ids: Tensor) -> None:
        """Take in the tokens sampled for a step: [num_sampled] int64."""
        self._token_ids[inputs.sampled_slots, inputs.sampled_positions] = token_ids.to(torch.int32)

    def _slot_of(self, request: Request) -> int:
        slot = self._slots.get(request.request_id)
        if slot is None:
            return self._add(request)
        if request.first_changed_block < len(request.block_ids):
            self._copy_blocks(slot, request)
        return slot

    def _add(self, request: Request) -> int:
        if not self._free_slots:
            raise RuntimeError(f"request {request.request_id}: more requests run than there are slots")
        slot = self._slots[request.request_id] = self._free_slots.pop()
        sampling = request.sampling
        self._token_ids[slot, : request.num_tokens] = self._tensor(request.token_ids, torch.int32)
        self._num_prompt_tokens[slot] = request.num_prompt_tokens
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._seed[slot] = sampling.seed - (sampling.seed >> 63 << 64)  # the same bits, signed
        self._choice[slot] = request.choice
        request.first_changed_block = 0
        self._copy_blocks(slot, request)
        return slot

    def _copy_blocks(self, slot: int, request: Request) -> None:
        """Copy the block ids that are news."""
        first, end = request.first_changed_block, len(request.block_ids)
        self._block_table[slot, first:end] = self._tensor(request.block_ids[first:], torch.int32)
        request.first_changed_block = end

    def _lay_out(self, entries: list[PlanEntry], slots: list[int]) -> StepInputs:
        counts = [entry.num_tokens for entry in entries]
        ends = [entry.start + entry.num_tokens for entry in entries]
        resident = [entry.request.num_resident_tokens for entry in entries]
        num_tokens = sum(counts)
        slot, count, end, num_resident = self._tensor([slots, counts, ends, resident])
        query_ends = count.cumsum(0)
        entry = torch.repeat_interleave(count, output_size=num_tokens)
        positions = torch.arange(num_tokens, device=self._device) + (end - query_ends)[entry]
        token_slots = slot[entry]
        blocks = self._block_table[token_slots, positions // self._block_size].long()
        slot_mapping = blocks * self._block_size + positions % self._block_size
        sampling = self._tensor([index for index, entry in enumerate(entries) if entry.samples])
        return StepInputs(
            token_ids=self._token_ids[token_slots, positions],
            positions=positions,
            slot_mapping=slot_mapping.masked_fill_(positions < num_resident[entry], -1),
            block_table=self._block_table[slot, : -(-max(ends) // self._block_size)],
            cu_query_lens=torch.cat((query_ends.new_zeros(1), query_ends)).to(torch.int32),
            context_lens=end.to(torch.int32),
            sampled_rows=query_ends[sampling] - 1,
            sampled_slots=slot[sampling],
            sampled_positions=end[sampling],
            random=self._random_rows(
                [entry.request for entry in entries if entry.samples], slot[sampling], end[sampling]
            ),
        )

    def _random_rows(self, requests: list[Request], slots: Tensor, positions: Tensor) -> RandomRows | None:
        drawn = [row for row, request in enumerate(requests) if not request.sampling.is_greedy]
        if not drawn:
            return None
        rows = self._tensor(drawn)
        slots = slots[rows]
        return RandomRows(
            rows=rows,
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            seed=self._seed[slots],
            output_position=positions[rows] - self._num_prompt_tokens[slots],
            choice=self._choice[slots],
            has_top_k=any(requests[row].sampling.top_k > 0 for row in drawn),
            has_top_p=any(requests[row].sampling.top_p < 1 for row in drawn),
        )

    def _zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def _tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        """Copy numbers to the device; from pinned memory to a GPU, so that nothing waits."""
        is_gpu = self._device.type == "cuda"
        return torch.tensor(values, dtype=dtype, pin_memory=is_gpu).to(self._device, non_blocking=True)
