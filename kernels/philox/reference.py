"""Philox4x32-10 on plain integers, as the paper writes it."""

from __future__ import annotations


def philox4x32(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Return four random 32-bit words."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = (product1 >> 32) ^ c1 ^ k0, (product0 >> 32) ^ c3 ^ k1
        c1, c3 = product1 % 2**32, product0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3
