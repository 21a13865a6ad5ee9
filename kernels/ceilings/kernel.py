"""Reading memory as fast as it goes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_kernel(memory_ptr, sums_ptr, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    """sums[i] = sum of memory[i * NUM_BLOCKS * BLOCK : (i + 1) * NUM_BLOCKS * BLOCK]."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for block in range(NUM_BLOCKS):
        total += tl.load(memory_ptr + (program * NUM_BLOCKS + block) * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums_ptr + program, tl.sum(total))
