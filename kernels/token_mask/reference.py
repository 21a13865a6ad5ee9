"""The definition of a token mask: what the kernel is tested against."""

from __future__ import annotations

from torch import Tensor


def apply_token_mask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set logits of tokens that are not allowed to -inf, one at a time."""
    for row, words in zip(rows.tolist(), bits.tolist(), strict=True):
        for token in range(logits.shape[1] if row >= 0 else 0):
            if not words[token // 32] >> token % 32 & 1:
                logits[row, token] = float("-inf")
