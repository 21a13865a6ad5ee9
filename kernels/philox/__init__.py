"""Philox4x32-10, a counter-based random number generator: equal keys and counters give equal numbers, everywhere.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011), https://doi.org/10.1145/2063384.2063405.
"""

from __future__ import annotations

from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox4x32(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random words for each key and counter. Words are int64 tensors of one shape, in [0, 2^32)."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_NUM_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_INCREMENTS[0]) & _MASK, (k1 + _KEY_INCREMENTS[1]) & _MASK
    return c0, c1, c2, c3


def uniform53(high: Tensor, low: Tensor) -> Tensor:
    """Return float64 in [0, 1), a multiple of 2^-53, from two random words."""
    return (high * 2**21 + (low >> 11)).double() * 2.0**-53


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low half of a 64-bit product. int64 wraps, and the sign is masked away."""
    product = word * multiplier
    return (product >> 32) & _MASK, product & _MASK
