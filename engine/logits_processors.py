"""What requests have done to their logits before a token is chosen: biases, and tokens that are out.

A processor keeps what requests asked for in rows of its own, one a slot of the persistent batch, and edits the logits
of all rows that ask in a few operations. Its memory is taken when a request first asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvern.engine.device_copy import PinnedRing
from kvern.engine.request import Request
from kvern.kernels.token_mask import apply_token_mask

_OUT = float("-inf")

NEVER, ALWAYS = 0, 2**62
"""Positions before which a request asks for an edit."""

_ANY = -1
_NOTHING = -2
"""In place of token ids: equal to every token, and to none."""


class LogitsEdit(Protocol):
    """One step's part of one processor."""

    @property
    def rows(self) -> Tensor:
        """[num_edited] int64 rows of the logits."""
        ...

    def apply(self, logits: Tensor) -> None:
        """Change those rows of [num_rows, vocab_size] float32 logits in place."""
        ...


@dataclass(frozen=True, slots=True)
class EditedRows:
    """Rows of a step's logits, whose they are and where their tokens go: [num_edited] int64 each."""

    rows: Tensor
    slots: Tensor
    positions: Tensor


class LogitsProcessor(Protocol):
    """Edits the logits of requests that ask for it."""

    def add(self, slot: int, request: Request) -> int:
        """Take in a request. Return the position before which its tokens want this, NEVER if none does."""
        ...

    def apply(self, logits: Tensor, at: EditedRows) -> None:
        """Change rows of [num_rows, vocab_size] float32 logits in place."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessorEdit:
    """A processor on some rows. Implements `LogitsEdit`."""

    processor: LogitsProcessor
    at: EditedRows

    @property
    def rows(self) -> Tensor:
        return self.at.rows

    def apply(self, logits: Tensor) -> None:
        self.processor.apply(logits, self.at)


@cache
def _byte_addends(device: torch.device) -> Tensor:
    """Return what each byte of a bitmask adds to the logits of its 8 tokens: [256, 8] float32."""
    is_set = torch.arange(256)[:, None] >> torch.arange(8) & 1 == 1
    return torch.zeros(256, 8).masked_fill_(~is_set, _OUT).to(device)


@dataclass(frozen=True, slots=True)
class TokenBitmask:
    """What grammars allow, in the layout that xgrammar and llguidance fill. Implements `LogitsEdit`."""

    rows: Tensor
    bits: Tensor
    """[num_edited, ceil(vocab_size / 32)] int32: bit i % 32 of word i // 32 is set where token i is allowed."""

    def apply(self, logits: Tensor) -> None:
        if logits.is_cuda:
            apply_token_mask(logits, self.rows, self.bits)
            return
        # A byte at a time, by table: shifting each bit into place takes five times as long.
        addends = functional.embedding(self.bits.view(torch.uint8).int(), _byte_addends(logits.device)).flatten(1)
        logits.index_add_(0, self.rows, addends[:, : logits.shape[1]])


class LogitBias:
    """logit_bias and allowed_token_ids, as one addend for each token."""

    def __init__(self, num_slots: int, vocab_size: int, ring: PinnedRing) -> None:
        self._shape = (num_slots, vocab_size)
        self._ring = ring

    @cached_property
    def addends(self) -> Tensor:
        """[num_slots, vocab_size] float32."""
        return torch.zeros(self._shape, device=self._ring.device)

    def add(self, slot: int, request: Request) -> int:
        bias, allowed = request.sampling.logit_bias, request.sampling.allowed_token_ids
        if not bias and not allowed:
            return NEVER
        addends = self.addends[slot].fill_(_OUT if allowed else 0.0)
        if allowed:
            addends[self._ring.to_device(list(allowed))] = 0.0
        if bias:
            ids = self._ring.to_device(list(bias))
            addends[ids] += self._ring.to_device(list(bias.values()), torch.float32)
        return ALWAYS

    def apply(self, logits: Tensor, at: EditedRows) -> None:
        logits[at.rows] += self.addends[at.slots]


class BadWords:
    """Where the tokens so far end with all of a word but its last token, that token is out."""

    def __init__(self, token_ids: Tensor, ring: PinnedRing) -> None:
        """token_ids: [num_slots, longest request] int32, known up to the position that is sampled."""
        self._ring = ring
        self._token_ids = token_ids
        num_slots = len(token_ids)
        self._heads = token_ids.new_full((num_slots, 0, 0), _ANY)
        """[num_slots, most words, longest head] int32. Shorter heads begin with _ANY."""
        self._last_ids = token_ids.new_full((num_slots, 0), _NOTHING, dtype=torch.int64)
        """[num_slots, most words] int64, _NOTHING behind a slot's last word."""

    def add(self, slot: int, request: Request) -> int:
        words = request.sampling.bad_words
        if not words:
            return NEVER
        self._reserve(len(words), max(map(len, words)) - 1)
        longest = self._heads.shape[2]
        heads = [[_ANY] * (longest + 1 - len(word)) + list(word[:-1]) for word in words]
        self._heads[slot, : len(words)] = self._ring.to_device(heads, torch.int32).view(len(words), longest)
        self._last_ids[slot] = _NOTHING
        self._last_ids[slot, : len(words)] = self._ring.to_device([word[-1] for word in words])
        return ALWAYS

    def apply(self, logits: Tensor, at: EditedRows) -> None:
        heads, last_ids = self._heads[at.slots], self._last_ids[at.slots]
        is_next = ((heads == _ANY) | (heads == self._recent(at)[:, None])).all(dim=-1) & (last_ids != _NOTHING)
        # Added, as one word may be at its end and another, with the same last token, not.
        logits.index_put_((at.rows[:, None], last_ids.clamp(min=0)), _addends(is_next), accumulate=True)

    def _recent(self, at: EditedRows) -> Tensor:
        """Return the tokens before each row's: [num_edited, longest head]."""
        places = at.positions[:, None] + torch.arange(-self._heads.shape[2], 0, device=at.positions.device)
        ids = self._token_ids[at.slots[:, None], places.clamp(min=0)]
        return ids.masked_fill_(places < 0, _NOTHING)

    def _reserve(self, num_words: int, longest: int) -> None:
        """Make room. What is added to the front of heads is _ANY, and what is added behind the last word unused."""
        self._last_ids = _widened(self._last_ids, num_words)
        more_tokens = max(0, longest - self._heads.shape[2])
        more_words = self._last_ids.shape[1] - self._heads.shape[1]
        self._heads = functional.pad(self._heads, (more_tokens, 0, 0, more_words), value=_ANY)


class MinTokens:
    """What would end a request is out until it has min_tokens, unless that leaves it nothing."""

    def __init__(self, num_slots: int, eos_token_ids: frozenset[int], ring: PinnedRing) -> None:
        self._eos_token_ids = eos_token_ids
        self._ring = ring
        self._end_ids = torch.zeros((num_slots, 0), dtype=torch.int64, device=ring.device)
        """[num_slots, most ids of any] int64, _NOTHING behind a slot's last id."""

    def add(self, slot: int, request: Request) -> int:
        stopping = request.stopping
        end_ids = stopping.stop_token_ids | (frozenset() if stopping.ignore_eos else self._eos_token_ids)
        if stopping.min_tokens == 0 or not end_ids:
            return NEVER
        self._end_ids = _widened(self._end_ids, len(end_ids))
        self._end_ids[slot] = _NOTHING
        self._end_ids[slot, : len(end_ids)] = self._ring.to_device(list(end_ids))
        return request.num_prompt_tokens + stopping.min_tokens

    def apply(self, logits: Tensor, at: EditedRows) -> None:
        before, end_ids = logits[at.rows], self._end_ids[at.slots]
        after = before.scatter_add(1, end_ids.clamp(min=0), _addends(end_ids != _NOTHING))
        leaves_nothing = after.amax(dim=-1, keepdim=True) == _OUT
        logits[at.rows] = torch.where(leaves_nothing, before, after)


def _addends(is_out: Tensor) -> Tensor:
    """Return float32: -inf where a token is out, else 0."""
    return torch.zeros_like(is_out, dtype=torch.float32).masked_fill_(is_out, _OUT)


def _widened(ids: Tensor, num_columns: int) -> Tensor:
    """Return a table with at least so many columns, new ones filled with _NOTHING."""
    return functional.pad(ids, (0, max(0, num_columns - ids.shape[1])), value=_NOTHING)
