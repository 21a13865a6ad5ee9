"""Copies of blocks against their definition: every byte that must not change is looked at too."""

from __future__ import annotations

import pytest
import torch

from kvern.kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from kvern.kernels.block_copy.checks import checks, make_kv
from kvern.kernels.check import Check, assert_same


@pytest.mark.parametrize("check", list(checks()), ids=lambda check: check.name)
def test_copies_equal_reference(check: Check) -> None:
    check.run(torch.device("cpu"))


def test_no_copies_change_nothing() -> None:
    kv, none = make_kv(torch.float32), torch.tensor([], dtype=torch.int64)
    before = kv.clone()
    copy_blocks(kv, none, none)
    assert_same(kv, before)
    assert gather_blocks(kv, none).shape == (0, *kv.shape[1:])


def test_blocks_in_pieces_raise_value_error() -> None:
    ids = torch.tensor([0])
    with pytest.raises(ValueError, match="one run of bytes"):
        copy_blocks(make_kv(torch.float32).transpose(0, 1), ids, ids)
    with pytest.raises(ValueError, match=r"block ids are \[1\] of torch.int32"):
        copy_blocks(make_kv(torch.float32), ids, ids.int())
    with pytest.raises(ValueError, match=r"blocks are \[2"):
        scatter_blocks(make_kv(torch.float32), ids, make_kv(torch.float32)[:2])
