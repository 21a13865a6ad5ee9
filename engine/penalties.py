"""Penalties on tokens that a request has had already."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from kvern.engine.device_copy import PinnedRing
from kvern.engine.logits_processors import ALWAYS, NEVER, EditedRows
from kvern.engine.request import Request

_LARGEST = 1e30
"""Bound on what repetition_penalty makes of a logit: division by the least temperature must not overflow."""


class Penalties:
    """Repetition penalty over prompt and output, then frequency and presence penalty over output.

    Counts stay on the device: made from all tokens when a request enters a slot, and then kept up with what is sampled.
    Implements `LogitsProcessor`. Source of the formulas: arXiv:1909.05858 and the OpenAI API.
    """

    def __init__(self, token_ids: Tensor, vocab_size: int, ring: PinnedRing) -> None:
        """token_ids: [num_slots, longest request] int32, known up to a request's length when it is added."""
        self._token_ids = token_ids
        self._ring = ring
        self._shape = (len(token_ids), vocab_size)

    @cached_property
    def params(self) -> Tensor:
        """[num_slots, 3] float32: repetition, frequency and presence penalty."""
        return self._zeros(torch.float32, self._shape[0], 3)

    @cached_property
    def in_prompt(self) -> Tensor:
        """[num_slots, vocab_size] bool."""
        return self._zeros(torch.bool, *self._shape)

    @cached_property
    def output_counts(self) -> Tensor:
        """[num_slots, vocab_size] int32."""
        return self._zeros(torch.int32, *self._shape)

    def add(self, slot: int, request: Request) -> int:
        sampling = request.sampling
        params = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        if params == (1, 0, 0):
            return NEVER
        self.params[slot] = self._ring.to_device(params, torch.float32)
        ids = self._token_ids[slot, : request.num_tokens].long()
        prompt, output = ids[: request.num_prompt_tokens], ids[request.num_prompt_tokens :]
        self.in_prompt[slot].zero_()[prompt] = True
        self.output_counts[slot].zero_().scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        return ALWAYS

    def apply(self, logits: Tensor, at: EditedRows) -> None:
        repetition, frequency, presence = self.params[at.slots, :, None].unbind(1)
        counts = self.output_counts[at.slots]
        is_output = counts > 0
        edited = logits[at.rows]
        repeated = torch.where(edited > 0, edited / repetition, edited * repetition).clamp_(-_LARGEST, _LARGEST)
        # What is out stays out.
        is_seen = (is_output | self.in_prompt[at.slots]) & (edited > float("-inf"))
        edited = torch.where(is_seen, repeated, edited)
        logits[at.rows] = edited - counts * frequency - is_output * presence

    def count(self, at: EditedRows, token_ids: Tensor) -> None:
        """Take in the tokens sampled for rows: [num_edited] int64."""
        self.output_counts[at.slots, token_ids] += 1

    def _zeros(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._token_ids.device)
