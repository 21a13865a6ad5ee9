"""What the kernels of decode and of chunks share: reading a tile of tokens from blocks, and the running softmax.

Softmax is in base 2 and float32. A row that has seen nothing yet has maximum -inf, sum 0 and zeros; what is hidden
from a row adds exact zeros to it. So a row's result depends neither on the rows beside it nor on hidden tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(at_ptr, rows, seen, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, COMPUTE_DTYPE: tl.constexpr):
    """Return [len(rows), BLOCK_D] in COMPUTE_DTYPE. rows: element offsets, int64; where not seen, zeros.

    What is not seen is not read: a block may hold anything there, NaN too, and 0 * NaN is NaN.
    """
    dims = tl.arange(0, BLOCK_D)
    mask = seen[:, None]
    if HEAD_DIM < BLOCK_D:
        mask = mask & (dims < HEAD_DIM)[None, :]
    tile = tl.load(at_ptr + rows[:, None] + dims[None, :], mask=mask, other=0.0)
    return tile.to(COMPUTE_DTYPE)


@triton.jit
def find_rows(table_ptr, positions, seen, stride_block, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the element offsets of tokens at positions of a sequence. Blocks of a large pool lie past 2^31."""
    blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    return blocks * stride_block + positions % BLOCK_SIZE * HEAD_DIM


@triton.jit
def score(q, k, inner_scale, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Return q @ k.T, or tanh(q @ k.T * inner_scale) where scores are capped. To be multiplied by the outer scale."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if HAS_SOFTCAP:
        scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (inner_scale * 2.8853900817779268)))  # exp(2x) = 2^(2x / ln 2)
    return scores


@triton.jit
def accumulate(attended, maximum, total, scores, v, outer_scale, COMPUTE_DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Add a tile's values to the running softmax: 2^(scores * outer_scale - maximum) @ v. Hidden scores are -inf."""
    exponents = scores * outer_scale
    new_maximum = tl.maximum(maximum, tl.max(exponents, axis=1))
    finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(exponents - finite[:, None])
    fading = tl.exp2(maximum - finite)
    total = total * fading + tl.sum(weights, axis=1)
    attended = tl.dot(weights.to(COMPUTE_DTYPE), v, attended * fading[:, None], input_precision=PRECISION)
    return attended, new_maximum, total
