"""Grouped experts against their definition. What must be written is NaN before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvern.kernels.experts import reference
from kvern.kernels.experts.grouped import experts

from .poison import poisoned_outputs

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}


def make_inputs(
    num_tokens: int,
    *,
    num_experts: int = 6,
    top_k: int = 2,
    hidden_size: int = 63,
    size: int = 41,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.3).to(dtype)

    weights, ids = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k)
    gate_up, down = random(num_experts, 2 * size, hidden_size), random(num_experts, hidden_size, size)
    return [random(num_tokens, hidden_size), gate_up, down, ids, weights]


def computed(*inputs: Tensor) -> Tensor:
    with poisoned_outputs():
        return experts(*inputs)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 1, 1), (5, 7, 3), (123, 2, 1)])
def test_experts_equal_reference(num_tokens: int, num_experts: int, top_k: int) -> None:
    inputs = make_inputs(num_tokens, num_experts=num_experts, top_k=top_k)
    assert_close(computed(*inputs), reference.experts(*inputs))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_experts_of_each_type_equal_reference(dtype: torch.dtype) -> None:
    inputs = make_inputs(63, num_experts=3, top_k=3, dtype=dtype)
    actual = computed(*inputs)
    assert actual.dtype is dtype
    assert_close(actual, reference.experts(*inputs))


def test_order_in_which_a_token_names_its_experts_changes_nothing() -> None:
    x, gate_up, down, ids, weights = make_inputs(9, num_experts=7, top_k=5)
    expected = computed(x, gate_up, down, ids, weights)
    order = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)).argsort(dim=1)
    assert torch.equal(computed(x, gate_up, down, ids.gather(1, order), weights.gather(1, order)), expected)


def test_experts_of_sizes_above_one_tile_equal_reference() -> None:
    inputs = make_inputs(2, hidden_size=600, size=131, dtype=torch.float16)
    inputs[0] *= 0.1
    assert_close(computed(*inputs), reference.experts(*inputs))


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


def test_token_has_the_same_result_alone_and_in_any_company() -> None:
    x, gate_up, down, ids, weights = make_inputs(70)
    together = computed(x, gate_up, down, ids, weights)
    for row in (0, 41, 69):
        one = slice(row, row + 1)
        assert torch.equal(computed(x[one], gate_up, down, ids[one], weights[one])[0], together[row])


def test_experts_of_types_that_do_not_fit_raise_value_error() -> None:
    x, gate_up, down, ids, weights = make_inputs(3)
    with pytest.raises(ValueError, match=r"down is of torch.bfloat16"):
        experts(x, gate_up, down.bfloat16(), ids, weights)
    with pytest.raises(ValueError, match=r"expert_ids are of torch.int32"):
        experts(x, gate_up, down, ids.int(), weights)
