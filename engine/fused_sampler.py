"""Sampling by Triton kernels: shapes follow from the number of rows alone, so a CUDA graph may hold it.

A row's token is the one that `sampler` draws. What few requests ask for (bad words, min_tokens) is not in the kernels:
its tables grow with what is asked for, and a graph reads memory that stays where it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvern.engine.batch import PersistentBatch
from kvern.engine.device_copy import PinnedRing
from kvern.engine.grammar_rows import GrammarRows
from kvern.engine.sampling_state import SampledRows
from kvern.kernels.sampling import LogitBias, Penalties, TokenMask, count_tokens, draw, edit_logits

NUM_COLUMNS = 6
"""Numbers a row: see `columns`."""

PADDING_ROW = (0, -1, 0, -1, -1, -1)
"""A row that fills up a batch."""


class FusedSampler:
    """Edits logits, draws, and takes in what was drawn."""

    def __init__(self, batch: PersistentBatch, vocab_size: int, ring: PinnedRing) -> None:
        self._batch = batch
        self._ring = ring
        self._state = batch.sampling
        num_words = -(-vocab_size // 32)
        self._mask = torch.zeros((len(batch.token_ids), num_words), dtype=torch.int32, device=ring.device)

    def columns(self, sampled: SampledRows, grammars: GrammarRows | None) -> list[list[int]]:
        """Return what a step's rows are drawn by, a list of each.

        Row of the step's tokens, slot, position, slot whose bias is added, slot whose penalties apply, row of the mask.
        """
        masks = [-1] * len(sampled)
        for mask, row in enumerate(grammars.rows if grammars is not None else ()):
            masks[row] = mask
        biased, penalized = (
            self._state.slots_asking(each, sampled) for each in (self._state.bias, self._state.penalties)
        )
        return [sampled.rows, sampled.slots, sampled.positions, biased, penalized, masks]

    def can_draw(self, sampled: SampledRows) -> bool:
        """Whether the kernels have all that a step asks for."""
        return not self._state.asks_for_others(sampled)

    def copy_mask(self, grammars: GrammarRows, vocab_size: int) -> None:
        """Ask the grammars, as far as they have come by now."""
        self._ring.copy(torch.from_numpy(grammars.bits(vocab_size)).view(-1), self._mask.view(-1))

    def draw(self, logits: Tensor, columns: Tensor) -> Tensor:
        """Draw a token a row: [3, num_rows] int64, as in `LaunchedSample`.

        logits: [num_rows, vocab_size] float32, changed in place; columns: [NUM_COLUMNS, num_rows] int64.
        """
        _, slots, positions, biased, penalized, masks = columns
        state = self._state
        penalties = Penalties(
            penalized, state.penalties.params, state.penalties.in_prompt, state.penalties.output_counts
        )
        bias, mask = LogitBias(biased, state.bias.addends), TokenMask(masks, self._mask)
        edited = edit_logits(logits, slots, mask, bias, penalties)
        token_ids, is_allowed = draw(edited.logits, slots, positions - state.num_prompt_tokens[slots], state.params)
        count_tokens(penalties, token_ids)
        self._batch.token_ids[slots, positions] = token_ids.to(torch.int32)
        return torch.stack((token_ids, edited.is_finite.long(), is_allowed.long()))
