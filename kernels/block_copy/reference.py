"""The definition of copies of blocks: what the kernel is tested against."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_blocks(kv: Tensor, source_ids: Tensor, destination_ids: Tensor) -> None:
    """Copy blocks within the pool, one after another."""
    for source, destination in zip(source_ids.tolist(), destination_ids.tolist(), strict=True):
        if source >= 0 and destination >= 0:
            kv[destination] = kv[source]


def gather_blocks(kv: Tensor, block_ids: Tensor) -> Tensor:
    """Return copies of blocks."""
    return torch.stack([kv[block] for block in block_ids.tolist()])


def scatter_blocks(kv: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
    """Write blocks, one after another."""
    for block, values in zip(block_ids.tolist(), blocks, strict=True):
        if block >= 0:
            kv[block] = values
