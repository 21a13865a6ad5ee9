"""KV blocks moved as what they are: runs of bytes. Within the pool, into one buffer, and back."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["copy_blocks", "gather_blocks", "scatter_blocks"]


def copy_blocks(kv: Tensor, source_ids: Tensor, destination_ids: Tensor) -> None:
    """Copy blocks within the pool.

    kv: [num_blocks, ...] contiguous; source_ids, destination_ids: [num_copies] int64, -1 where nothing is copied. No
    block is written twice, none both read and written.
    Raises ValueError for shapes, strides or types that do not fit.
    """
    words = _words(kv)
    _check_ids(source_ids, destination_ids)
    _launch(words, words, source_ids, destination_ids)


def gather_blocks(kv: Tensor, block_ids: Tensor) -> Tensor:
    """Return copies of blocks, one after another: [len(block_ids), ...] of kv's type. block_ids: int64."""
    out = torch.empty(len(block_ids), *kv.shape[1:], dtype=kv.dtype, device=kv.device)
    _check_ids(block_ids)
    _launch(_words(kv), _words(out), block_ids, None)
    return out


def scatter_blocks(kv: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
    """Write what `gather_blocks` returned into blocks of the pool, -1 where one is not written."""
    if blocks.shape != (len(block_ids), *kv.shape[1:]) or blocks.dtype is not kv.dtype:
        raise ValueError(
            f"blocks are {list(blocks.shape)} of {blocks.dtype}; "
            f"{[len(block_ids), *kv.shape[1:]]} of {kv.dtype} is needed"
        )
    _check_ids(block_ids)
    _launch(_words(blocks), _words(kv), None, block_ids)


def _launch(source: Tensor, destination: Tensor, source_ids: Tensor | None, destination_ids: Tensor | None) -> None:
    # Imported here: a CPU does without Triton.
    from kvern.kernels.block_copy.kernel import launch

    launch(source, destination, source_ids, destination_ids)


def _words(kv: Tensor) -> Tensor:
    """View blocks as [num_blocks, words] of the widest type that divides them."""
    if not kv.is_contiguous():
        raise ValueError(f"a block must be one run of bytes; the strides of {list(kv.shape)} are {kv.stride()}")
    rows = kv.flatten(1).view(torch.uint8)
    return rows.view(torch.int64) if rows.shape[1] % 8 == 0 else rows


def _check_ids(*ids: Tensor) -> None:
    for each in ids:
        if each.shape != ids[0].shape or each.dim() != 1 or each.dtype is not torch.int64 or not each.is_contiguous():
            raise ValueError(f"block ids are {list(each.shape)} of {each.dtype}; {list(ids[0].shape)} int64 is needed")
