"""Tokens from logits on a CPU, compiled by numba: one pass over a row where torch takes many.

Measured on one core of an AMD EPYC 9004, for 49,152 tokens: weights in 0.019 ms, against 0.11 ms in torch and 0.028 ms
for torch's softmax alone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvern.kernels.cpu import Operation, compiled, doubles, floats, integers, run, take, thread_kernel
from kvern.kernels.sampling.weights import COEFFICIENTS, EXPONENT_BIAS, LEAST_EXPONENT, LOG2_E, MANTISSA_BITS

_C5, _C4, _C3, _C2, _C1, _C0 = (np.float32(coefficient) for coefficient in COEFFICIENTS)
_LOG2_E, _LEAST, _HALF = np.float32(LOG2_E), np.float32(LEAST_EXPONENT), np.float32(0.5)
_BIAS, _SHIFT = np.int32(EXPONENT_BIAS), np.int32(MANTISSA_BITS)

_CHUNK = 1024
"""Tokens that are looked at together before the one among them is sought."""


def token_weights(scaled: Tensor) -> Tensor:
    """Return the weights of float32 values: int64. The same bits as in `weights`."""
    scaled, out = scaled.contiguous(), torch.empty(scaled.shape, dtype=torch.int64)
    run(Operation(_weigh, (scaled.data_ptr(), scaled.numel(), out.data_ptr())), 1)
    return out


def greatest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's greatest logit, NaN where it holds one, and the lowest id that has it. logits: float32."""
    logits, (num_rows, vocab_size) = logits.contiguous(), logits.shape
    best, token_ids = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    num_threads = min(num_rows, torch.get_num_threads())
    arguments = logits.data_ptr(), num_rows, vocab_size, best.data_ptr(), token_ids.data_ptr()
    run(Operation(_find, arguments), num_threads)
    return best, token_ids


def draw(logits: Tensor, best: Tensor, rows: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token for some rows, from all tokens, as `engine.sampler` defines it: [num_drawn] int64.

    logits: [num_rows, vocab_size] float32; best: [num_rows] float32, each row's greatest, where not finite the token is
    0; rows: [num_drawn] int64; temperature: [num_drawn] float32; uniform: [num_drawn] float64 in [0, 1).
    """
    num_drawn = len(rows)
    logits, best, rows = logits.contiguous(), best.contiguous(), rows.contiguous()
    temperature, uniform = temperature.contiguous(), uniform.contiguous()
    token_ids = torch.zeros(num_drawn, dtype=torch.int64)
    of_rows = logits.data_ptr(), logits.shape[1], len(logits), best.data_ptr()
    drawn = num_drawn, rows.data_ptr(), temperature.data_ptr(), uniform.data_ptr(), token_ids.data_ptr()
    run(Operation(_draw, (*of_rows, *drawn)), min(num_drawn, torch.get_num_threads()))
    return token_ids


@compiled
def _weight(scaled):  # type: ignore[no-untyped-def]
    exponent = max(scaled * _LOG2_E, _LEAST)
    whole = np.floor(exponent + _HALF)
    part = exponent - whole
    mantissa = ((((_C5 * part + _C4) * part + _C3) * part + _C2) * part + _C1) * part + _C0
    power = np.int32((np.int32(whole) + _BIAS) << _SHIFT)
    return np.int64(mantissa * power.view(np.float32))


@thread_kernel
def _weigh(arguments):  # type: ignore[no-untyped-def]
    _, scaled, size, out = integers(arguments, 4)
    values, weights = floats(scaled, size), integers(out, size)
    for place in range(size):
        weights[place] = _weight(values[place])


@compiled
def _key(value):  # type: ignore[no-untyped-def]
    """Return an int32 in the order of numbers; -0.0 counts as 0.0."""
    bits = np.float32(value + np.float32(0.0)).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@compiled
def _greatest_key(values):  # type: ignore[no-untyped-def]
    """Return the greatest key, and whether there is a NaN."""
    greatest, has_nan = np.int32(-(2**31)), False
    for place in range(len(values)):
        greatest = max(greatest, _key(values[place]))
    for place in range(len(values)):
        has_nan |= values[place] != values[place]
    return greatest, has_nan


@compiled
def _find_greatest(values):  # type: ignore[no-untyped-def]
    """Return the lowest place of the greatest number, or of some NaN."""
    greatest, first = np.int32(-(2**31)), 0
    for chunk in range(0, len(values), _CHUNK):
        key, has_nan = _greatest_key(values[chunk : chunk + _CHUNK])
        if has_nan:
            return chunk + np.argmax(np.isnan(values[chunk : chunk + _CHUNK]))
        if key > greatest:
            greatest, first = key, chunk
    while _key(values[first]) != greatest:
        first += 1
    return first


@thread_kernel
def _find(arguments):  # type: ignore[no-untyped-def]
    _, logits, num_rows, vocab_size, best, token_ids = integers(arguments, 6)
    row = take(arguments, 1)
    while row < num_rows:
        values = floats(logits + 4 * row * vocab_size, vocab_size)
        token_id = _find_greatest(values)
        integers(token_ids, num_rows)[row], floats(best, num_rows)[row] = token_id, values[token_id]
        row = take(arguments, 1)


@compiled
def _weight_of(values, greatest, temperature):  # type: ignore[no-untyped-def]
    total = np.int64(0)
    for place in range(len(values)):
        total += _weight((values[place] - greatest) / temperature)
    return total


@compiled
def _invert(values, greatest, temperature, uniform):  # type: ignore[no-untyped-def]
    """Return the first token whose cumulative weight exceeds the number's share of the whole."""
    num_chunks = -(-len(values) // _CHUNK)
    weights = np.empty(num_chunks, dtype=np.int64)
    for chunk in range(num_chunks):
        weights[chunk] = _weight_of(values[chunk * _CHUNK : (chunk + 1) * _CHUNK], greatest, temperature)
    total = weights.sum()
    # float64 may round the product, or the whole before it, up to the whole.
    left = min(np.int64(uniform * total), total - 1)
    chunk = 0
    while left >= weights[chunk]:
        left -= weights[chunk]
        chunk += 1
    token = chunk * _CHUNK
    while True:
        left -= _weight((values[token] - greatest) / temperature)
        if left < 0:
            return token
        token += 1


@thread_kernel
def _draw(arguments):  # type: ignore[no-untyped-def]
    _, logits, vocab_size, num_rows, best, num_drawn, rows, temperature, uniform, token_ids = integers(arguments, 10)
    place = take(arguments, 1)
    while place < num_drawn:
        row = integers(rows, num_drawn)[place]
        greatest = floats(best, num_rows)[row]
        if np.isfinite(greatest):
            values = floats(logits + 4 * row * vocab_size, vocab_size)
            share = doubles(uniform, num_drawn)[place]
            token_id = _invert(values, greatest, floats(temperature, num_drawn)[place], share)
            integers(token_ids, num_drawn)[place] = token_id
        place = take(arguments, 1)
