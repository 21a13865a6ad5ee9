"""The gated activation in bfloat16 on a CPU, compiled by numba."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from kvern.kernels.cpu import bfloats, compiled, exponential, rounded, threads_for, widened
from kvern.kernels.gated_activation import GatedActivation

_GREATEST = np.float32(87.0)
"""Exponent whose power float32 holds. Beyond it the activation is what it is there, rounded."""


def gated_activation(x: Tensor, activation: GatedActivation) -> Tensor:
    """Return activation(gate) * up, computed in float32. x: [num_tokens, 2 * size], contiguous, gates before ups."""
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=torch.bfloat16)
    num_threads = threads_for(num_tokens * size)
    gate_rows, gate = _SILU if activation is GatedActivation.SILU else _GELU
    if num_threads == 1:
        gate_rows(x.data_ptr(), out.data_ptr(), 0, num_tokens, size)
    else:
        gate(x.data_ptr(), out.data_ptr(), num_tokens, size, num_threads)
    return out


@compiled
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return np.float32(1.0) / (np.float32(1.0) + exponential(min(max(-x, -_GREATEST), _GREATEST)))


@compiled
def _silu_rows(x, out, begin, end, size):  # type: ignore[no-untyped-def]
    for row in range(begin, end):
        inputs, outputs = bfloats(x + 4 * row * size, 2 * size), bfloats(out + 2 * row * size, size)
        for place in range(size):
            gate = widened(inputs[place])
            outputs[place] = rounded(gate * _sigmoid(gate) * widened(inputs[size + place]))


@compiled
def _gelu_rows(x, out, begin, end, size):  # type: ignore[no-untyped-def]
    """With (1 + tanh(z)) / 2 = sigmoid(2 z)."""
    for row in range(begin, end):
        inputs, outputs = bfloats(x + 4 * row * size, 2 * size), bfloats(out + 2 * row * size, size)
        for place in range(size):
            gate = widened(inputs[place])
            cubic = gate + np.float32(0.044715) * gate * gate * gate
            outputs[place] = rounded(gate * _sigmoid(np.float32(1.5957691216) * cubic) * widened(inputs[size + place]))


def _silu_all(x, out, num_tokens, size, num_threads):  # type: ignore[no-untyped-def]
    for thread in numba.prange(num_threads):
        _silu_rows(x, out, thread * num_tokens // num_threads, (thread + 1) * num_tokens // num_threads, size)


def _gelu_all(x, out, num_tokens, size, num_threads):  # type: ignore[no-untyped-def]
    for thread in numba.prange(num_threads):
        _gelu_rows(x, out, thread * num_tokens // num_threads, (thread + 1) * num_tokens // num_threads, size)


_SILU = (_silu_rows, compiled(_silu_all, parallel=True))
_GELU = (_gelu_rows, compiled(_gelu_all, parallel=True))
"""On one thread, and on several."""
