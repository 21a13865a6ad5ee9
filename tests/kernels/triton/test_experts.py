"""Grouped experts against their definition. What must be written is NaN before."""

from __future__ import annotations

import pytest
import torch

from kvern.kernels.check import Check
from kvern.kernels.experts.checks import checks, computed, make_inputs
from kvern.kernels.experts.grouped import experts


@pytest.mark.parametrize("check", list(checks()), ids=lambda check: check.name)
def test_experts_equal_reference(check: Check) -> None:
    check.run(torch.device("cpu"))


def test_order_in_which_a_token_names_its_experts_changes_nothing() -> None:
    x, gate_up, down, ids, weights = make_inputs(9, num_experts=7, top_k=5)
    expected = computed(x, gate_up, down, ids, weights)
    order = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)).argsort(dim=1)
    assert torch.equal(computed(x, gate_up, down, ids.gather(1, order), weights.gather(1, order)), expected)


def test_experts_nobody_is_routed_to_are_not_read() -> None:
    x, gate_up, down, ids, weights = make_inputs(20)
    ids[:] = torch.tensor([4, 1])
    expected = computed(x, gate_up, down, ids, weights)
    gate_up[[0, 2, 3, 5]], down[[0, 2, 3, 5]] = float("nan"), float("nan")
    assert torch.equal(computed(x, gate_up, down, ids, weights), expected)


def test_tokens_that_fill_up_a_batch_take_part_in_nothing() -> None:
    x, gate_up, down, ids, weights = make_inputs(70)
    expected = computed(x, gate_up, down, ids, weights)
    ids[[0, 33, 69]] = -1
    x[[0, 33, 69]], weights[[0, 33, 69]] = float("nan"), float("nan")
    actual = computed(x, gate_up, down, ids, weights)
    assert (actual[[0, 33, 69]] == 0).all()
    rest = [row for row in range(70) if row not in (0, 33, 69)]
    assert torch.equal(actual[rest], expected[rest])


def test_experts_of_types_that_do_not_fit_raise_value_error() -> None:
    x, gate_up, down, ids, weights = make_inputs(3)
    with pytest.raises(ValueError, match=r"down is of torch.bfloat16"):
        experts(x, gate_up, down.bfloat16(), ids, weights)
    with pytest.raises(ValueError, match=r"expert_ids are of torch.int32"):
        experts(x, gate_up, down, ids.int(), weights)
