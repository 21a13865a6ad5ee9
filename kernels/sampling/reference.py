"""The definition of edits and draws, one row at a time: what the kernels are tested against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvern.kernels.philox import reference as philox_reference
from kvern.kernels.sampling.weights import token_weights

if TYPE_CHECKING:
    from kvern.kernels.sampling import DrawParams, LogitBias, Penalties, TokenMask

_LARGEST = 1e30
_LEAST_TEMPERATURE = 1e-5


def edit_logits(
    logits: Tensor, slots: Tensor, mask: TokenMask | None, bias: LogitBias | None, penalties: Penalties | None
) -> tuple[Tensor, list[bool]]:
    """Return edited logits in float32, and which rows are finite. Shapes are those of the launcher."""
    out = logits.to(torch.float32, copy=True)
    is_finite = []
    for row, slot in enumerate(slots.tolist()):
        is_finite.append(slot < 0 or bool(out[row].amax().isfinite()))
        if slot < 0:
            continue
        if bias is not None and bias.index[row] >= 0:
            out[row] += bias.addends[bias.index[row]]
        if mask is not None and mask.index[row] >= 0:
            words = mask.bits[mask.index[row]].tolist()
            is_out = [not words[token // 32] >> token % 32 & 1 for token in range(logits.shape[1])]
            out[row, torch.tensor(is_out)] = float("-inf")
        if penalties is not None and penalties.index[row] >= 0:
            out[row] = _penalized(out[row], penalties, int(penalties.index[row]))
    return out, is_finite


def _penalized(logits: Tensor, penalties: Penalties, index: int) -> Tensor:
    repetition, frequency, presence = penalties.params[index]
    counts = penalties.output_counts[index]
    is_seen = ((counts > 0) | penalties.in_prompt[index]) & (logits > float("-inf"))
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition).clamp(-_LARGEST, _LARGEST)
    penalized: Tensor = torch.where(is_seen, repeated, logits) - counts * frequency - (counts > 0) * presence
    return penalized


def draw(logits: Tensor, slots: Tensor, output_positions: Tensor, params: DrawParams) -> list[int]:
    """Return each row's token, 0 for rows that fill up the batch. Shapes are those of the launcher."""
    return [
        0 if slot < 0 else _draw(row, slot, position, params)
        for row, slot, position in zip(logits, slots.tolist(), output_positions.tolist(), strict=True)
    ]


def _draw(logits: Tensor, slot: int, position: int, params: DrawParams) -> int:
    """Sort, cut, and walk the weights, which are whole numbers of Python's."""
    order = logits.sort(descending=True, stable=True).indices.tolist()
    temperature = params.temperature[slot]
    if temperature < _LEAST_TEMPERATURE:
        return int(order[0])
    scaled = (logits - logits.amax()) / temperature
    weights = token_weights(scaled.masked_fill(scaled < params.log_min_p[slot], float("-inf"))).tolist()
    kept = order[: int(params.top_k[slot]) or None]
    nucleus = _nucleus(kept, weights, float(params.top_p[slot]))
    seed = int(params.seed[slot]) % 2**64
    high, low, _, _ = philox_reference.philox4x32((seed % 2**32, seed >> 32), (position, 0, 0, 0))
    total = sum(weights[token] for token in nucleus)
    target = min(int((high * 2**21 + (low >> 11)) * 2.0**-53 * float(total)), total - 1)
    for token in sorted(nucleus):
        target -= weights[token]
        if target < 0:
            return int(token)
    raise AssertionError("the number is at least the whole")


def _nucleus(kept: list[int], weights: list[int], top_p: float) -> list[int]:
    """Return the shortest head of tokens, the greatest first, that weighs at least top_p of all."""
    if top_p >= 1.0:
        return kept
    total = sum(weights[token] for token in kept)
    product = float(total) * top_p
    needed = min(max(int(product) + (product > int(product)), 1), total)
    for length, token in enumerate(kept, start=1):
        needed -= weights[token]
        if needed <= 0:
            return kept[:length]
    raise AssertionError("what is needed is more than there is")
