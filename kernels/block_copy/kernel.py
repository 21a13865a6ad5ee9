"""Copies of blocks in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
"""Words that a program copies: 16 KiB of a block of 64-bit words."""


@triton.jit(do_not_specialize_on_alignment=["source_ids_ptr", "destination_ids_ptr"])
def block_copy_kernel(source_ptr, destination_ptr, source_ids_ptr, destination_ids_ptr, num_words, BLOCK: tl.constexpr):
    """destination[destination_ids[i]] = source[source_ids[i]] for one i and BLOCK words. Without ids, i is the id."""
    index = tl.program_id(0).to(tl.int64)
    source = index if source_ids_ptr is None else tl.load(source_ids_ptr + index)
    destination = index if destination_ids_ptr is None else tl.load(destination_ids_ptr + index)
    if (source >= 0) & (destination >= 0):
        words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = words < num_words
        copied = tl.load(source_ptr + source * num_words + words, mask=mask, other=0)
        tl.store(destination_ptr + destination * num_words + words, copied, mask=mask)


def launch(source: Tensor, destination: Tensor, source_ids: Tensor | None, destination_ids: Tensor | None) -> None:
    """source, destination: [blocks, words] of one integer type. Ids not given: blocks in order."""
    num_copies = max(0 if ids is None else len(ids) for ids in (source_ids, destination_ids))
    num_words = source.shape[1]
    if num_copies and num_words:
        block_copy_kernel[(num_copies, triton.cdiv(num_words, _BLOCK))](
            source, destination, source_ids, destination_ids, num_words, BLOCK=_BLOCK, num_warps=4
        )
