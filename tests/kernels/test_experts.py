"""A layer of experts against its plain definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvern.kernels.experts import experts, reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}


def make_inputs(
    num_tokens: int, *, num_experts: int = 6, top_k: int = 2, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.3).to(dtype)

    scores = torch.rand(num_tokens, num_experts, generator=generator)
    weights, ids = scores.topk(top_k)
    return [random(num_tokens, 15), random(num_experts, 22, 15), random(num_experts, 15, 11), ids, weights]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (3, 2), (63, 6), (130, 3)])
def test_experts_equal_reference(num_tokens: int, top_k: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(num_tokens, top_k=top_k, dtype=dtype)
    actual = experts(*inputs)
    assert actual.dtype == dtype
    torch.testing.assert_close(
        actual.double(), reference.experts(*inputs), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_experts_nobody_is_routed_to_are_not_read() -> None:
    x, gate_up, down, ids, weights = make_inputs(20)
    ids[:] = torch.tensor([4, 1])
    expected = experts(x, gate_up, down, ids, weights)
    gate_up[[0, 2, 3, 5]], down[[0, 2, 3, 5]] = float("nan"), float("nan")
    torch.testing.assert_close(experts(x, gate_up, down, ids, weights), expected, atol=0, rtol=0)


def test_experts_of_shapes_that_do_not_fit_raise_value_error() -> None:
    x, gate_up, down, ids, weights = make_inputs(4)
    with pytest.raises(ValueError, match=r"gate_up \[6, 21, 15\]"):
        experts(x, gate_up[:, :-1], down, ids, weights)
    with pytest.raises(ValueError, match=r"4 tokens, expert_ids \[3, 2\]"):
        experts(x, gate_up, down, ids[:3], weights[:3])
