"""How the running requests sample: the sampling half of the persistent batch, and one step's view of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvern.engine.device_copy import to_device
from kvern.engine.logits_processors import (
    NEVER,
    BadWords,
    EditedRows,
    LogitBias,
    LogitsProcessor,
    MinTokens,
    ProcessorEdit,
)
from kvern.engine.penalties import Penalties
from kvern.engine.request import Request, SamplingParams
from kvern.engine.sampler import RandomRows


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The sampled rows whose log-probabilities are told."""

    indices: list[int]
    """Which of the step's sampled rows. Those that want most alternatives come first."""
    num_top: list[int]
    """How many alternatives each wants."""
    rows: Tensor
    """The indices on the device: [num_told] int64."""


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How one step's rows are sampled."""

    rows: Tensor
    """[num_sampled] int64 rows of the step's tokens: the last one of each entry that samples."""
    slots: Tensor
    """[num_sampled] int64."""
    positions: Tensor
    """[num_sampled] int64, where the new tokens go."""
    edits: list[ProcessorEdit]
    """In the order they apply. Where nobody asks for anything, none."""
    penalized: EditedRows | None
    """The rows whose tokens are counted."""
    random: RandomRows | None
    """The rows that are drawn. None: all are greedy."""
    logprobs: LogprobRows | None


class SamplingState:
    """A row of parameters for each slot, and processors for what few requests ask for."""

    def __init__(self, token_ids: Tensor, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """token_ids: [num_slots, longest request] int32, the batch's own."""
        self._device = token_ids.device
        num_slots = len(token_ids)
        self._temperature = self._zeros(num_slots, torch.float32)
        self._log_min_p = self._zeros(num_slots, torch.float32)
        self._top_k = self._zeros(num_slots, torch.int64)
        self._top_p = self._zeros(num_slots, torch.float64)
        self._seed = self._zeros(num_slots, torch.int64)
        self._num_prompt_tokens = self._zeros(num_slots, torch.int64)
        self._penalties = Penalties(token_ids, vocab_size)
        # Masks commute; min_tokens looks at what the others, and a grammar before them, have left.
        self._processors: tuple[LogitsProcessor, ...] = (
            LogitBias(num_slots, vocab_size, self._device),
            BadWords(token_ids),
            MinTokens(num_slots, eos_token_ids, self._device),
            self._penalties,
        )
        self._asking: tuple[dict[int, int], ...] = tuple({} for _ in self._processors)
        """For each processor, the slots that ask for it, and the position before which they do."""

    def add(self, slot: int, request: Request) -> None:
        """Take in a request, whose known tokens are in the batch already."""
        sampling = request.sampling
        self._temperature[slot] = sampling.temperature
        self._log_min_p[slot] = math.log(sampling.min_p) if sampling.min_p else -math.inf
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._seed[slot] = sampling.seed - (sampling.seed >> 63 << 64)  # the same bits, signed
        self._num_prompt_tokens[slot] = request.num_prompt_tokens
        for processor, asking in zip(self._processors, self._asking, strict=True):
            if (end := processor.add(slot, request)) != NEVER:
                asking[slot] = end

    def forget(self, slot: int) -> None:
        for asking in self._asking:
            asking.pop(slot, None)

    def select(
        self, requests: Sequence[Request], rows: list[int], slots: list[int], positions: list[int]
    ) -> SamplingInputs:
        """Gather what a step needs to sample for these requests. rows, slots, positions: as in SamplingInputs."""
        on_device = to_device([rows, slots, positions], self._device)
        edits = [
            ProcessorEdit(processor, at)
            for processor, asking in zip(self._processors, self._asking, strict=True)
            if (at := self._edited(asking, slots, positions)) is not None
        ]
        params = [request.sampling for request in requests]
        return SamplingInputs(
            rows=on_device[0],
            slots=on_device[1],
            positions=on_device[2],
            edits=edits,
            penalized=next((edit.at for edit in edits if edit.processor is self._penalties), None),
            random=self._random(params, on_device[1], on_device[2]),
            logprobs=self._logprobs(params),
        )

    def count(self, inputs: SamplingInputs, token_ids: Tensor) -> None:
        """Take in the tokens sampled for a step: [num_sampled] int64."""
        if inputs.penalized is not None:
            self._penalties.count(inputs.penalized, token_ids[inputs.penalized.rows])

    def _edited(self, asking: dict[int, int], slots: list[int], positions: list[int]) -> EditedRows | None:
        if not asking:
            return None
        places = enumerate(zip(slots, positions, strict=True))
        edited = [(row, slot, position) for row, (slot, position) in places if position < asking.get(slot, NEVER)]
        return EditedRows(*to_device(edited, self._device).unbind(1)) if edited else None

    def _random(self, params: list[SamplingParams], slots: Tensor, positions: Tensor) -> RandomRows | None:
        drawn = [row for row, sampling in enumerate(params) if not sampling.is_greedy]
        if not drawn:
            return None
        rows = to_device(drawn, self._device)
        slots = slots[rows]
        return RandomRows(
            rows=rows,
            temperature=self._temperature[slots],
            log_min_p=self._log_min_p[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            seed=self._seed[slots],
            output_position=positions[rows] - self._num_prompt_tokens[slots],
            has_min_p=any(params[row].min_p > 0 for row in drawn),
            has_top_k=any(params[row].top_k > 0 for row in drawn),
            has_top_p=any(params[row].top_p < 1 for row in drawn),
        )

    def _logprobs(self, params: list[SamplingParams]) -> LogprobRows | None:
        told = [(sampling.logprobs, row) for row, sampling in enumerate(params) if sampling.logprobs is not None]
        if not told:
            return None
        told.sort(reverse=True)
        indices = [row for _, row in told]
        return LogprobRows(indices, [count for count, _ in told], to_device(indices, self._device))

    def _zeros(self, num_slots: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(num_slots, dtype=dtype, device=self._device)
