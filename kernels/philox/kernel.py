"""Philox4x32-10 in Triton, and the uniform numbers that draws are made with."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox4x32(k0, k1, c0, c1, c2, c3):
    """Return four random words. All are uint32 of one shape."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def uniform53(seed, position, purpose):
    """Return float64 in [0, 1), a multiple of 2^-53.

    seed: int64, the bits of an unsigned number; position: int64 below 2^32; purpose: a constant. The counter's second
    word is 0: choices of one request have seeds of their own.
    """
    position = position.to(tl.uint32)
    zero = position ^ position
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    high, low, _, _ = philox4x32(k0, k1, position, zero, zero + purpose, zero)
    return ((high.to(tl.int64) << 21) + (low >> 11).to(tl.int64)).to(tl.float64) * (2.0**-53)
