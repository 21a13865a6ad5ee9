"""Rotation and KV write in bfloat16 on a CPU, compiled by numba."""

from __future__ import annotations

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

_TOKENS = 2
"""That a thread takes at a time."""


def rotary_kv(
    heads: Tensor, num_heads: int, rotation: tuple[Tensor, Tensor] | None, kv: Tensor, layer: int, slots: Tensor
) -> Tensor:
    """Return the rotated queries, and store keys and values.

    heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], queries, keys and values, contiguous; kv: bfloat16; the
    rest as in the launcher.
    """
    num_tokens, _, head_dim = heads.shape
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=torch.bfloat16)
    cos, sin = (0, 0) if rotation is None else (rotation[0].data_ptr(), rotation[1].data_ptr())
    rotary_dim = 0 if rotation is None else rotation[0].shape[2]
    operation = rotary_operation(
        heads.data_ptr(), num_heads, cos, sin, rotary_dim, kv, layer, slots.data_ptr(), out.data_ptr(), num_tokens
    )
    run(operation, threads_for(heads.numel()))
    return out


def rotary_operation(
    heads: Argument, num_heads: int, cos: Argument, sin: Argument, rotary_dim: int, kv: Tensor, layer: int,
    slots: Argument, out: Argument, num_tokens: Argument,
) -> Operation:  # fmt: skip
    """Return rotation and KV write as an operation. All but kv are addresses; rotary_dim: 0 for no rotation."""
    block_stride, layer_stride, part_stride, head_stride, _, _ = kv.stride()
    addresses = (heads, cos, sin, out, slots, kv.data_ptr() + 2 * layer * layer_stride)
    strides = (2 * block_stride, 2 * part_stride, 2 * head_stride)
    sizes = (num_heads, kv.shape[3], kv.shape[4], kv.shape[5], rotary_dim)
    return Operation(_rotate, (*addresses, *strides, num_tokens, *sizes))


@compiled
def _rotate_half(x, other, out, cosines, sines):  # type: ignore[no-untyped-def]
    for dim in range(len(out)):
        out[dim] = rounded(widened(x[dim]) * cosines[dim] + widened(other[dim]) * sines[dim])


@compiled
def _rotate_head(source, destination, cosines, sines, head_dim):  # type: ignore[no-untyped-def]
    """Write x * cos + swapped x * sin. source, destination: addresses; cosines, sines: [rotary_dim] float32."""
    half = len(cosines) // 2
    x, y = bfloats(source, half), bfloats(source + 2 * half, half)
    _rotate_half(x, y, bfloats(destination, half), cosines[:half], sines[:half])
    _rotate_half(y, x, bfloats(destination + 2 * half, half), cosines[half:], sines[half:])
    for dim in range(2 * half, head_dim):
        bfloats(destination, head_dim)[dim] = bfloats(source, head_dim)[dim]


@compiled
def _rotate_tokens(  # type: ignore[no-untyped-def]
    heads, cos, sin, out, slots, kv, block_stride, part_stride, head_stride,
    begin, end, num_heads, num_kv_heads, block_size, head_dim, rotary_dim,
):  # fmt: skip
    """Do tokens [begin, end). Addresses, and strides in bytes; kv: of the layer in block 0."""
    cosines, sines = np.empty(rotary_dim, dtype=np.float32), np.empty(rotary_dim, dtype=np.float32)
    head_bytes = 2 * head_dim
    slot_of = integers(slots, end)
    for token in range(begin, end):
        cosine_bits, sine_bits = (
            bfloats(cos + 2 * token * rotary_dim, rotary_dim),
            bfloats(sin + 2 * token * rotary_dim, rotary_dim),
        )
        for dim in range(rotary_dim):
            cosines[dim], sines[dim] = widened(cosine_bits[dim]), widened(sine_bits[dim])
        source = heads + token * (num_heads + 2 * num_kv_heads) * head_bytes
        for head in range(num_heads):
            destination = out + (token * num_heads + head) * head_bytes
            _rotate_head(source + head * head_bytes, destination, cosines, sines, head_dim)
        if slot_of[token] >= 0:
            keys, values = source + num_heads * head_bytes, source + (num_heads + num_kv_heads) * head_bytes
            block, offset = slot_of[token] // block_size, slot_of[token] % block_size
            destination = kv + block * block_stride + offset * head_bytes
            for head in range(num_kv_heads):
                _rotate_head(keys + head * head_bytes, destination, cosines, sines, head_dim)
                stored = bfloats(destination + part_stride, head_dim)
                stored[:] = bfloats(values + head * head_bytes, head_dim)
                destination += head_stride


@thread_kernel
def _rotate(arguments):  # type: ignore[no-untyped-def]
    (
        _, heads, cos, sin, out, slots, kv, block_stride, part_stride, head_stride,
        num_tokens, num_heads, num_kv_heads, block_size, head_dim, rotary_dim,
    ) = integers(arguments, 16)  # fmt: skip
    begin = take(arguments, _TOKENS)
    while begin < num_tokens:
        _rotate_tokens(
            heads, cos, sin, out, slots, kv, block_stride, part_stride, head_stride,
            begin, min(begin + _TOKENS, num_tokens), num_heads, num_kv_heads, block_size, head_dim, rotary_dim,
        )  # fmt: skip
        begin = take(arguments, _TOKENS)
