"""From logits to token ids.

A draw is a function of logits, sampling parameters, seed, choice and output position, bit for bit: probabilities are
made row by row, and from there on they are whole numbers, whose sums depend neither on their order nor on other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvern.kernels.philox import philox4x32, uniform53

_PURPOSE_TOKEN = 0
"""Third counter word of a draw: what it is for."""

_WEIGHT_SCALE = 2.0**48
"""Probability 1 as a whole number. A vocabulary's sum stays below 2^53, so float64 holds it exactly; a probability
below 2^-48 counts as none."""

_DIGITS = ((21, 11), (10, 11), (0, 10))
"""Shift and width of the digits that a 32-bit key is searched by, highest first."""


@dataclass(frozen=True, slots=True)
class RandomRows:
    """The rows of a step that are drawn, not greedy, and how. All tensors: [num_random]."""

    rows: Tensor
    """int64 row of the logits."""
    temperature: Tensor
    """float32."""
    top_k: Tensor
    """int64. 0: all tokens."""
    top_p: Tensor
    """float64."""
    seed: Tensor
    """int64, the bits of an unsigned seed."""
    output_position: Tensor
    """int64. How many tokens were output before this one."""
    choice: Tensor
    """int64."""
    has_top_k: bool
    has_top_p: bool
    """Whether any row filters by it. The result does not depend on it, only the time."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Drawn tokens, on the logits' device."""

    token_ids: Tensor
    """[num_rows] int64. Where not ok, some id."""
    ok: Tensor
    """[num_rows] bool. False where the logits hold NaN or +inf, or are all -inf."""


def sample(logits: Tensor, random: RandomRows | None) -> Sample:
    """Choose a token for each row of [num_rows, vocab_size] float32 logits. Rows not in `random` are greedy.

    Of equal logits the lowest id counts as the greater, in greedy rows and at the edge of top_k and top_p alike.
    """
    best, token_ids = logits.max(dim=-1)
    ok = best.isfinite()
    if random is not None:
        token_ids[random.rows] = _draw(logits[random.rows], ok[random.rows], random)
    return Sample(token_ids, ok)


def _draw(logits: Tensor, ok: Tensor, random: RandomRows) -> Tensor:
    """Temperature, then top_k, then top_p, then one draw from what is left."""
    scaled = logits / random.temperature[:, None] + 0.0  # -0.0 becomes 0.0, which must count as its equal
    scaled.masked_fill_(~ok[:, None], 0.0)
    keys = _ordered_keys(scaled)
    if random.has_top_k:
        vocab_size = scaled.shape[1]
        num_kept = torch.where(random.top_k > 0, random.top_k.clamp(max=vocab_size), vocab_size)
        kept = _most_likely(keys, torch.ones_like(keys), num_kept)
        scaled.masked_fill_(~kept, float("-inf"))
    weights = (torch.softmax(scaled, dim=-1) * _WEIGHT_SCALE).long()
    if random.has_top_p:
        needed = (weights.sum(dim=-1) * random.top_p).ceil().long().clamp(min=1)
        weights.masked_fill_(~_most_likely(keys, weights, needed), 0)
    return _invert(weights, _uniform(random))


def _ordered_keys(values: Tensor) -> Tensor:
    """Map float32 to int64 in [0, 2^32), in the same order."""
    bits = values.view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + 2**31


def _most_likely(keys: Tensor, weights: Tensor, needed: Tensor) -> Tensor:
    """Return which tokens make up the smallest set of greatest keys that weighs at least `needed`.

    keys, weights: [num_rows, vocab_size] int64; needed: [num_rows] int64, above 0 and at most the row's weight. Equal
    keys have equal weights; of those at the edge, the lowest ids are in. Found digit by digit (a radix select): sorting
    a vocabulary takes ten times as long.
    """
    edge = torch.zeros_like(needed)
    rest = needed
    candidates = weights
    for shift, width in _DIGITS:
        digits = (keys >> shift) & (2**width - 1)
        by_digit = weights.new_zeros(len(weights), 2**width).scatter_add_(1, digits, candidates)
        from_top = by_digit.flip(1).cumsum(1)
        place = torch.searchsorted(from_top, rest[:, None])
        above = from_top - by_digit.flip(1)
        rest = rest - above.gather(1, place)[:, 0]
        digit = 2**width - 1 - place
        candidates = candidates.masked_fill(digits != digit, 0)
        edge = (edge << width) | digit[:, 0]
    taken_before = candidates.cumsum(1) - candidates
    return (keys > edge[:, None]) | ((keys == edge[:, None]) & (taken_before < rest[:, None]))


def _uniform(random: RandomRows) -> Tensor:
    """One number in [0, 1) a row: [num_random] float64."""
    seed_low, seed_high = random.seed & 0xFFFFFFFF, (random.seed >> 32) & 0xFFFFFFFF
    zero = torch.zeros_like(random.seed)
    counter = (random.output_position, random.choice, zero + _PURPOSE_TOKEN, zero)
    high, low, _, _ = philox4x32((seed_low, seed_high), counter)
    return uniform53(high, low)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token, in order of ids, whose cumulative weight exceeds the number's share of the whole."""
    cumulative = weights.cumsum(dim=-1)
    target = (uniform * cumulative[:, -1]).long()
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
