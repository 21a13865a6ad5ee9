"""Token masks in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def load_is_allowed(bits_ptr, tokens, mask):
    """Return whether the bit of each token is set in one row of a bitmask."""
    words = tl.load(bits_ptr + tokens // 32, mask=mask, other=0)
    return ((words >> (tokens % 32)) & 1) != 0


@triton.jit
def token_mask_kernel(logits_ptr, rows_ptr, bits_ptr, vocab_size, num_words, stride_row, BLOCK: tl.constexpr):
    """logits = -inf where the token's bit is 0, for one row and BLOCK tokens. What is allowed is not touched."""
    masked = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + masked)
    if row >= 0:
        tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        in_vocab = tokens < vocab_size
        is_allowed = load_is_allowed(bits_ptr + masked * num_words, tokens, in_vocab)
        out = tl.full((BLOCK,), float("-inf"), tl.float32).to(logits_ptr.dtype.element_ty)
        tl.store(logits_ptr + row * stride_row + tokens, out, mask=in_vocab & ~is_allowed)


def launch(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Shapes as in the launcher."""
    vocab_size = logits.shape[1]
    grid = (len(rows), triton.cdiv(vocab_size, _BLOCK))
    token_mask_kernel[grid](logits, rows, bits, vocab_size, bits.shape[1], logits.stride(0), BLOCK=_BLOCK, num_warps=4)
