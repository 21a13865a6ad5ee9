"""RMSNorm in bfloat16 on a CPU, compiled by numba. A row has the same bits in every batch."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from kvern.kernels.cpu import (
    Argument,
    Operation,
    bfloats,
    compiled,
    integers,
    rounded,
    run,
    take,
    thread_kernel,
    threads_for,
    widened,
)

_LANES = 64
"""Squares that are added up side by side."""

_ROWS = 2
"""That a thread takes at a time."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight). Shapes and strides as in the launcher."""
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    _launch(x, 0, weight, out, 0, eps, unit_offset)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and the sum, rounded before it is normed.

    x, residual: [num_tokens, size], contiguous.
    """
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual.data_ptr(), weight, out, total.data_ptr(), eps, unit_offset)
    return out, total


def norm_operation(
    x: Argument, residual: Argument, weight: Tensor, out: Argument, total: Argument, num_tokens: Argument,
    eps: float, *, unit_offset: bool,
) -> Operation:  # fmt: skip
    """Return the norm of x + residual as an operation. All but the weight are addresses; residual: 0 for none.

    x, residual, out, total: [num_tokens, size], contiguous. Where total overlaps others, it takes twice as long.
    """
    size = weight.shape[0]
    arguments = (x, 2 * size, 0, residual, weight.data_ptr(), out, total, num_tokens, 1, size)
    return Operation(_norm, (*arguments, _bits(eps), int(unit_offset)))


def _launch(x: Tensor, residual: int, weight: Tensor, out: Tensor, total: int, eps: float, unit_offset: bool) -> None:
    shape, strides = x.shape, x.stride()
    num_heads = shape[1] if len(shape) == 3 else 1
    addresses = (x.data_ptr(), 2 * strides[0], 2 * strides[-2], residual, weight.data_ptr(), out.data_ptr(), total)
    num_rows, rest = shape[0] * num_heads, (num_heads, shape[-1], _bits(eps), int(unit_offset))
    num_threads = threads_for(x.numel())
    if num_threads == 1:
        _norm_rows(*addresses, 0, num_rows, *rest)
    else:
        run(Operation(_norm, (*addresses, num_rows, *rest)), num_threads)


@cache
def _bits(number: float) -> int:
    """Return the bits of a float32."""
    return int(np.float32(number).view(np.int32))


@compiled
def _inverse_norm(row, lanes, eps):  # type: ignore[no-untyped-def]
    """Return 1 / sqrt(mean(row^2) + eps). lanes: [_LANES] float32, scratch."""
    lanes[:] = 0.0
    size = len(row)
    whole = size // _LANES * _LANES
    for first in range(0, whole, _LANES):
        for lane in range(_LANES):
            value = widened(row[first + lane])
            lanes[lane] += value * value
    for place in range(whole, size):
        value = widened(row[place])
        lanes[place - whole] += value * value
    half = _LANES // 2
    while half:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half //= 2
    return np.float32(1.0) / np.sqrt(lanes[0] / np.float32(size) + eps)


@compiled
def _norm_rows(x, x_stride, x_head_stride, residual, weight, out, total, begin, end, num_heads, size, eps, offset):  # type: ignore[no-untyped-def]
    """Norm rows [begin, end), those of one token together.

    Addresses, and strides in bytes; residual: 0 for none; eps: the bits of a float32.
    """
    eps, offset = np.int32(eps).view(np.float32), np.float32(offset)
    weights = bfloats(weight, size)
    lanes = np.empty(_LANES, dtype=np.float32)
    for row in range(begin, end):
        values = bfloats(x + row // num_heads * x_stride + row % num_heads * x_head_stride, size)
        if residual:
            residuals, totals = bfloats(residual + 2 * row * size, size), bfloats(total + 2 * row * size, size)
            for place in range(size):
                totals[place] = rounded(widened(values[place]) + widened(residuals[place]))
            values = totals
        inverse = _inverse_norm(values, lanes, eps)
        outputs = bfloats(out + 2 * row * size, size)
        for place in range(size):
            outputs[place] = rounded(widened(values[place]) * inverse * (offset + widened(weights[place])))


@thread_kernel
def _norm(arguments):  # type: ignore[no-untyped-def]
    _, x, x_stride, x_head_stride, residual, weight, out, total, num_rows, num_heads, size, eps, offset = integers(
        arguments, 13
    )
    begin = take(arguments, _ROWS)
    while begin < num_rows:
        end = min(begin + _ROWS, num_rows)
        _norm_rows(x, x_stride, x_head_stride, residual, weight, out, total, begin, end, num_heads, size, eps, offset)
        begin = take(arguments, _ROWS)
