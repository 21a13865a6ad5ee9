"""The gated activation in bfloat16 on a CPU, compiled by numba."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvern.kernels.cpu import (
    Argument,
    Operation,
    bfloats,
    compiled,
    exponential,
    integers,
    rounded,
    run,
    take,
    thread_kernel,
    threads_for,
    widened,
)
from kvern.kernels.gated_activation import GatedActivation

_GREATEST = np.float32(87.0)
"""Exponent whose power float32 holds. Beyond it the activation is what it is there, rounded."""


def gated_activation(x: Tensor, activation: GatedActivation) -> Tensor:
    """Return activation(gate) * up, computed in float32. x: [num_tokens, 2 * size], contiguous, gates before ups."""
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=torch.bfloat16)
    operation = gate_operation(x.data_ptr(), activation, out.data_ptr(), num_tokens, size)
    run(operation, threads_for(num_tokens * size))
    return out


def gate_operation(
    x: Argument, activation: GatedActivation, out: Argument, num_tokens: Argument, size: int
) -> Operation:
    """Return the gated activation as an operation. x, out: addresses."""
    return Operation(_silu if activation is GatedActivation.SILU else _gelu, (x, out, num_tokens, size))


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


@thread_kernel
def _silu(arguments):  # type: ignore[no-untyped-def]
    _, x, out, num_tokens, size = integers(arguments, 5)
    row = take(arguments, 1)
    while row < num_tokens:
        _silu_rows(x, out, row, row + 1, size)
        row = take(arguments, 1)


@thread_kernel
def _gelu(arguments):  # type: ignore[no-untyped-def]
    _, x, out, num_tokens, size = integers(arguments, 5)
    row = take(arguments, 1)
    while row < num_tokens:
        _gelu_rows(x, out, row, row + 1, size)
        row = take(arguments, 1)
