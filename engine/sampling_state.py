"""How the running requests sample: the sampling half of the persistent batch, and one step's view of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvern.engine.device_copy import PinnedRing
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
from kvern.kernels.sampling import DrawParams


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
class SampledRows:
    """The rows of one step that are sampled, as the host knows them."""

    requests: list[Request]
    """Whose they are."""
    rows: list[int]
    """Of the step's tokens: the last one of each entry that samples."""
    slots: list[int]
    positions: list[int]
    """Where the new tokens go."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How one step's rows are sampled, on the device."""

    slots: Tensor
    """[num_sampled] int64."""
    positions: Tensor
    """[num_sampled] int64."""
    edits: list[ProcessorEdit]
    """In the order they apply. Where nobody asks for anything, none."""
    penalized: EditedRows | None
    """The rows whose tokens are counted."""
    random: RandomRows | None
    """The rows that are drawn. None: all are greedy."""


class SamplingState:
    """A row of parameters for each slot, and processors for what few requests ask for."""

    def __init__(self, token_ids: Tensor, vocab_size: int, eos_token_ids: frozenset[int], ring: PinnedRing) -> None:
        """token_ids: [num_slots, longest request] int32, the batch's own."""
        self._ring = ring
        num_slots = len(token_ids)
        self.params = DrawParams(
            temperature=self._zeros(num_slots, torch.float32),
            log_min_p=self._zeros(num_slots, torch.float32),
            top_k=self._zeros(num_slots, torch.int64),
            top_p=self._zeros(num_slots, torch.float64),
            seed=self._zeros(num_slots, torch.int64),
        )
        self.num_prompt_tokens = self._zeros(num_slots, torch.int64)
        self.bias = LogitBias(num_slots, vocab_size, ring)
        self.penalties = Penalties(token_ids, vocab_size, ring)
        # Masks commute; min_tokens looks at what the others, and a grammar before them, have left.
        self._processors: tuple[LogitsProcessor, ...] = (
            self.bias,
            BadWords(token_ids, ring),
            MinTokens(num_slots, eos_token_ids, ring),
            self.penalties,
        )
        self._asking: tuple[dict[int, int], ...] = tuple({} for _ in self._processors)
        """For each processor, the slots that ask for it, and the position before which they do."""

    def add(self, slot: int, request: Request) -> None:
        """Take in a request, whose known tokens are in the batch already."""
        sampling = request.sampling
        self.params.temperature[slot] = sampling.temperature
        self.params.log_min_p[slot] = math.log(sampling.min_p) if sampling.min_p else -math.inf
        self.params.top_k[slot] = sampling.top_k
        self.params.top_p[slot] = sampling.top_p
        self.params.seed[slot] = sampling.seed - (sampling.seed >> 63 << 64)  # the same bits, signed
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        for processor, asking in zip(self._processors, self._asking, strict=True):
            if (end := processor.add(slot, request)) != NEVER:
                asking[slot] = end

    def forget(self, slot: int) -> None:
        for asking in self._asking:
            asking.pop(slot, None)

    def slots_asking(self, processor: LogitsProcessor, sampled: SampledRows) -> list[int]:
        """Return the slots of rows that ask for a processor, -1 for rows that do not."""
        asking = self._asking[self._processors.index(processor)]
        places = zip(sampled.slots, sampled.positions, strict=True)
        return [slot if position < asking.get(slot, NEVER) else -1 for slot, position in places]

    def asks_for_others(self, sampled: SampledRows) -> bool:
        """Whether any row asks for more than a bias and penalties."""
        others = [processor for processor in self._processors if processor not in (self.bias, self.penalties)]
        return any(slot >= 0 for processor in others for slot in self.slots_asking(processor, sampled))

    def select(self, sampled: SampledRows) -> SamplingInputs:
        """Gather what torch needs to sample a step."""
        slots, positions = sampled.slots, sampled.positions
        on_device = self._ring.to_device([slots, positions])
        edits = [
            ProcessorEdit(processor, at)
            for processor, asking in zip(self._processors, self._asking, strict=True)
            if (at := self._edited(asking, slots, positions)) is not None
        ]
        return SamplingInputs(
            slots=on_device[0],
            positions=on_device[1],
            edits=edits,
            penalized=next((edit.at for edit in edits if edit.processor is self.penalties), None),
            random=self._random([request.sampling for request in sampled.requests], *on_device),
        )

    def told(self, sampled: SampledRows) -> LogprobRows | None:
        """Return the rows whose log-probabilities are told. None: nobody asks."""
        counts = (request.sampling.logprobs for request in sampled.requests)
        told = [(count, row) for row, count in enumerate(counts) if count is not None]
        if not told:
            return None
        told.sort(reverse=True)
        indices = [row for _, row in told]
        return LogprobRows(indices, [count for count, _ in told], self._ring.to_device(indices))

    def count(self, inputs: SamplingInputs, token_ids: Tensor) -> None:
        """Take in the tokens sampled for a step: [num_sampled] int64."""
        if inputs.penalized is not None:
            self.penalties.count(inputs.penalized, token_ids[inputs.penalized.rows])

    def _edited(self, asking: dict[int, int], slots: list[int], positions: list[int]) -> EditedRows | None:
        if not asking:
            return None
        places = enumerate(zip(slots, positions, strict=True))
        edited = [(row, slot, position) for row, (slot, position) in places if position < asking.get(slot, NEVER)]
        return EditedRows(*self._ring.to_device(edited).unbind(1)) if edited else None

    def _random(self, params: list[SamplingParams], slots: Tensor, positions: Tensor) -> RandomRows | None:
        drawn = [row for row, sampling in enumerate(params) if not sampling.is_greedy]
        if not drawn:
            return None
        rows = self._ring.to_device(drawn)
        slots = slots[rows]
        return RandomRows(
            rows=rows,
            temperature=self.params.temperature[slots],
            log_min_p=self.params.log_min_p[slots],
            top_k=self.params.top_k[slots],
            top_p=self.params.top_p[slots],
            seed=self.params.seed[slots],
            output_position=positions[rows] - self.num_prompt_tokens[slots],
            has_min_p=any(params[row].min_p > 0 for row in drawn),
            has_top_k=any(params[row].top_k > 0 for row in drawn),
            has_top_p=any(params[row].top_p < 1 for row in drawn),
        )

    def _zeros(self, num_slots: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(num_slots, dtype=dtype, device=self._ring.device)
