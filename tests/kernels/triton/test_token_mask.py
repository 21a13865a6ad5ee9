"""Token masks against their definition, and against what the engine does on a CPU."""

from __future__ import annotations

import pytest
import torch

from kvern.engine.logits_processors import TokenBitmask
from kvern.kernels.check import Check
from kvern.kernels.token_mask import apply_token_mask
from kvern.kernels.token_mask.checks import checks, make_inputs


@pytest.mark.parametrize("check", list(checks()), ids=lambda check: check.name)
def test_token_mask_equals_reference(check: Check) -> None:
    check.run(torch.device("cpu"))


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
