"""Copies of blocks against their definition: every byte that must not change is looked at too."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from kvern.kernels.block_copy import copy_blocks, gather_blocks, reference, scatter_blocks
from kvern.kernels.check import Check, assert_same, name_of, poisoned_outputs

_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def checks() -> Iterator[Check]:
    for head_dim, dtype in product((1, 63, 256), _DTYPES):
        yield Check(f"copies, heads of {head_dim}, {name_of(dtype)}", partial(_check_copy, head_dim, dtype))
    for dtype in _DTYPES:
        yield Check(f"gather, {name_of(dtype)}", partial(_check_gather, dtype))
        yield Check(f"scatter, {name_of(dtype)}", partial(_check_scatter, dtype))
    yield Check("a pool past two to the 31", _check_large_pool)


def make_kv(dtype: torch.dtype, head_dim: int = 63, num_blocks: int = 9) -> Tensor:
    """Return blocks of random bits."""
    shape = (num_blocks, 3, 2, 3, 5, head_dim)
    generator = torch.Generator().manual_seed(head_dim)
    bits = torch.randint(0, 256, (*shape[:-1], head_dim * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape)


def _check_copy(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    kv = make_kv(dtype, head_dim)
    sources, destinations = torch.tensor([8, 2, -1, 2, 5]), torch.tensor([0, 7, 4, 1, -1])
    actual = kv.to(device, copy=True)
    copy_blocks(actual, sources.to(device), destinations.to(device))
    reference.copy_blocks(kv, sources, destinations)
    assert_same(actual, kv)


def _check_gather(dtype: torch.dtype, device: torch.device) -> None:
    kv, block_ids = make_kv(dtype), torch.tensor([8, 0, 3, 3])
    with poisoned_outputs():
        gathered = gather_blocks(kv.to(device), block_ids.to(device))
    assert_same(gathered, reference.gather_blocks(kv, block_ids))


def _check_scatter(dtype: torch.dtype, device: torch.device) -> None:
    kv, block_ids, blocks = make_kv(dtype), torch.tensor([6, -1, 0]), make_kv(dtype, num_blocks=3)
    actual = kv.to(device, copy=True)
    scatter_blocks(actual, block_ids.to(device), blocks.to(device))
    reference.scatter_blocks(kv, block_ids, blocks)
    assert_same(actual, kv)


def _check_large_pool(device: torch.device) -> None:
    """In words of a byte, as a block is no whole number of longer ones. A CPU commits only what is touched."""
    kv = torch.empty(2100, 2**20 + 1, dtype=torch.uint8, device=device)
    kv[2098] = 3
    copy_blocks(kv, torch.tensor([2098], device=device), torch.tensor([2099], device=device))
    assert bool((kv[2099] == 3).all())
