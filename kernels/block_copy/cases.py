"""Copies of blocks as engines launch them: what differs in what is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kvern.kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from kvern.kernels.launch_case import LaunchCase


def cases() -> Iterator[LaunchCase]:
    """Blocks of Llama 3 8B, and such that are no whole number of 64-bit words."""
    yield LaunchCase("8B", torch.bfloat16, partial(_launch, dtype=torch.bfloat16, shape=(2, 32, 2, 8, 16, 128)))
    yield LaunchCase("odd", torch.float8_e4m3fn, partial(_launch, dtype=torch.float8_e4m3fn, shape=(2, 1, 2, 3, 1, 7)))


def _launch(device: torch.device, *, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    kv, ids = torch.zeros(shape, device=device).to(dtype), torch.zeros(2, dtype=torch.int64, device=device)
    copy_blocks(kv, ids, ids)
    scatter_blocks(kv, ids, gather_blocks(kv, ids))
