"""Token masks against their definition, and against what the engine does on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvern.engine.logits_processors import TokenBitmask
from kvern.kernels.token_mask import apply_token_mask, reference


def make_inputs(vocab_size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator).to(dtype)
    bits = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), generator=generator, dtype=torch.int64)
    return logits, torch.tensor([4, 0, 2]), bits.to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 123, 5003])
def test_token_mask_equals_reference(vocab_size: int, dtype: torch.dtype) -> None:
    logits, rows, bits = make_inputs(vocab_size, dtype)
    expected = logits.clone()
    reference.apply_token_mask(expected, rows, bits)
    apply_token_mask(logits, rows, bits)
    assert torch.equal(logits, expected)


def test_token_mask_equals_the_engine_on_a_cpu() -> None:
    logits, rows, bits = make_inputs(1001)
    expected = logits.clone()
    TokenBitmask(rows, bits).apply(expected)
    apply_token_mask(logits, rows, bits)
    assert torch.equal(logits, expected)


def test_token_mask_of_no_row_changes_nothing() -> None:
    logits, rows, bits = make_inputs(123)
    before = logits.clone()
    apply_token_mask(logits, torch.full_like(rows, -1), bits)
    assert torch.equal(logits, before)


def test_token_mask_writes_in_the_row_it_is_for_only() -> None:
    whole = torch.zeros(3, 140)
    apply_token_mask(whole[:, :123], torch.tensor([1]), torch.zeros(1, 4, dtype=torch.int32))
    assert torch.equal(
        whole == float("-inf"), torch.arange(140).expand(3, -1).lt(123) & torch.eye(3)[1][:, None].bool()
    )


def test_token_mask_of_shapes_that_do_not_fit_raises_value_error() -> None:
    logits, rows, bits = make_inputs(123)
    with pytest.raises(ValueError, match=r"bits are \[3, 3\]"):
        apply_token_mask(logits, rows, bits[:, :3].contiguous())
    with pytest.raises(ValueError, match=r"rows are \[3\] of torch.int32"):
        apply_token_mask(logits, rows.int(), bits)
