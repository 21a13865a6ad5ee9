"""Copies of blocks of Llama 3 8B, in bytes a second: `python -m kvern.kernels.block_copy.bench`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import torch

from kvern.kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from kvern.kernels.ceilings.rates import Work, print_rates

_BLOCK_SHAPE = (32, 2, 8, 16, 128)


def works(device: torch.device) -> Iterator[Work]:
    """256 blocks of 2 MiB, dealt out at random."""
    kv = torch.zeros(1024, *_BLOCK_SHAPE, dtype=torch.bfloat16, device=device)
    sources, destinations = torch.randperm(1024, device=device)[:512].view(2, 256)
    gathered = gather_blocks(kv, sources)
    num_bytes = 2 * 2 * gathered.numel()
    yield Work("copy of 256 blocks", partial(copy_blocks, kv, sources, destinations), num_bytes)
    yield Work("gather of 256 blocks", partial(gather_blocks, kv, sources), num_bytes)
    yield Work("scatter of 256 blocks", partial(scatter_blocks, kv, destinations, gathered), num_bytes)


if __name__ == "__main__":
    sys.exit(print_rates(works))
