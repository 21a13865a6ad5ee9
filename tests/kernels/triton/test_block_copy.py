"""Copies of blocks against their definition: every byte that must not change is looked at too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvern.kernels.block_copy import copy_blocks, gather_blocks, reference, scatter_blocks

from .poison import poisoned_outputs

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def make_kv(dtype: torch.dtype, head_dim: int = 63, num_blocks: int = 9) -> Tensor:
    shape = (num_blocks, 3, 2, 3, 5, head_dim)
    bits = torch.randint(0, 256, (*shape[:-1], head_dim * dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def same(actual: Tensor, expected: Tensor) -> bool:
    """Whether all bytes are the same: NaN is as good as any other."""
    return torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 63, 256])
def test_copied_blocks_equal_reference(head_dim: int, dtype: torch.dtype) -> None:
    kv = make_kv(dtype, head_dim)
    expected = kv.clone()
    sources, destinations = torch.tensor([8, 2, -1, 2, 5]), torch.tensor([0, 7, 4, 1, -1])
    reference.copy_blocks(expected, sources, destinations)
    copy_blocks(kv, sources, destinations)
    assert same(kv, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_blocks_equal_reference(dtype: torch.dtype) -> None:
    kv, block_ids = make_kv(dtype), torch.tensor([8, 0, 3, 3])
    with poisoned_outputs():
        gathered = gather_blocks(kv, block_ids)
    assert gathered.dtype is dtype
    assert same(gathered, reference.gather_blocks(kv, block_ids))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scattered_blocks_equal_reference(dtype: torch.dtype) -> None:
    kv, block_ids = make_kv(dtype), torch.tensor([6, -1, 0])
    expected, blocks = kv.clone(), make_kv(dtype, num_blocks=3)
    reference.scatter_blocks(expected, block_ids, blocks)
    scatter_blocks(kv, block_ids, blocks)
    assert same(kv, expected)


def test_blocks_of_a_large_pool_are_addressed_past_two_to_the_31() -> None:
    """In words of a byte, as a block is no whole number of longer ones. What is not touched is not committed."""
    block_bytes = 2**20 + 1
    storage = torch.UntypedStorage(2100 * block_bytes)
    kv = torch.tensor([], dtype=torch.uint8).set_(storage).view(2100, block_bytes)
    kv[2098] = 3
    copy_blocks(kv, torch.tensor([2098]), torch.tensor([2099]))
    assert (kv[2099] == 3).all()


def test_no_copies_change_nothing() -> None:
    kv, none = make_kv(torch.float32), torch.tensor([], dtype=torch.int64)
    before = kv.clone()
    copy_blocks(kv, none, none)
    assert same(kv, before)
    assert gather_blocks(kv, none).shape == (0, *kv.shape[1:])


def test_blocks_in_pieces_raise_value_error() -> None:
    ids = torch.tensor([0])
    with pytest.raises(ValueError, match="one run of bytes"):
        copy_blocks(make_kv(torch.float32).transpose(0, 1), ids, ids)
    with pytest.raises(ValueError, match=r"block ids are \[1\] of torch.int32"):
        copy_blocks(make_kv(torch.float32), ids, ids.int())
    with pytest.raises(ValueError, match=r"blocks are \[2"):
        scatter_blocks(make_kv(torch.float32), ids, make_kv(torch.float32)[:2])
