"""A layer's kernels in bfloat16 on a CPU, against their definitions, and a row alone against the same in company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvern.kernels.gated_activation import GatedActivation
from kvern.kernels.gated_activation import cpu as gated_activation
from kvern.kernels.rms_norm import cpu as rms_norm
from kvern.kernels.rotary_kv import cpu as rotary_kv
from kvern.kernels.rotary_kv import reference as rotary_kv_reference

BF16 = torch.bfloat16
MANY = 130
"""Rows that are shared out to several threads."""


def numbers(*shape: int, spread: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * spread).to(BF16)


def assert_rounded(actual: Tensor, exact: Tensor) -> None:
    """exact: float64."""
    torch.testing.assert_close(actual.double(), exact, rtol=1.01 * 2**-8, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("size", [576, 60])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_norm_of_a_sum_equals_its_definition_alone_and_in_company(size: int, unit_offset: bool) -> None:
    x, residual, weight = numbers(MANY, size), numbers(MANY, size, spread=3.0).flip(0).contiguous(), numbers(size)
    actual, total = rms_norm.add_rms_norm(x, residual, weight, 1e-5, unit_offset=unit_offset)
    assert torch.equal(total, x + residual)
    factor = weight.double() + unit_offset
    assert_rounded(actual, functional.rms_norm(total.double(), (size,), factor, 1e-5))
    assert torch.equal(actual, rms_norm.rms_norm(total, weight, 1e-5, unit_offset=unit_offset))
    for row in (0, 1, MANY - 1):
        alone = rms_norm.add_rms_norm(x[row : row + 1], residual[row : row + 1], weight, 1e-5, unit_offset=unit_offset)
        assert torch.equal(alone[0][0], actual[row])


def test_norm_of_some_of_a_tokens_heads_equals_that_of_their_copy() -> None:
    heads, weight = numbers(MANY, 15, 80)[:, 9:12, :64], numbers(64)
    assert torch.equal(rms_norm.rms_norm(heads, weight, 1e-6), rms_norm.rms_norm(heads.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("activation", GatedActivation)
def test_gated_activation_equals_its_definition_alone_and_in_company(activation: GatedActivation) -> None:
    x = numbers(MANY, 2 * 700, spread=6.0)
    x[0, :4] = torch.tensor([300.0, -300.0, 0.0, float("nan")])
    actual = gated_activation.gated_activation(x, activation)
    gate, up = x.double().chunk(2, dim=1)
    is_silu = activation is GatedActivation.SILU
    assert_rounded(actual, (functional.silu(gate) if is_silu else functional.gelu(gate, approximate="tanh")) * up)
    assert actual[0, 3].isnan()
    for row in (0, MANY - 1):
        alone = gated_activation.gated_activation(x[row : row + 1], activation)
        assert torch.equal(alone.view(torch.int16)[0], actual.view(torch.int16)[row])


@pytest.mark.parametrize("rotary_dim", [0, 32, 64])
@pytest.mark.parametrize("num_tokens", [1, MANY])
def test_rotation_and_kv_write_equal_their_definition(num_tokens: int, rotary_dim: int) -> None:
    num_heads, num_kv_heads = 9, 3
    heads = numbers(num_tokens, num_heads + 2 * num_kv_heads, 64)
    rotation = None if rotary_dim == 0 else (numbers(num_tokens, 1, rotary_dim), numbers(num_tokens, 1, rotary_dim))
    slots = torch.randperm(16 * 16, generator=torch.Generator().manual_seed(1))[:num_tokens]
    slots[1::7] = -1
    actual_kv, expected_kv = (torch.zeros(16, 2, 2, num_kv_heads, 16, 64, dtype=BF16) for _ in range(2))
    actual = rotary_kv.rotary_kv(heads, num_heads, rotation, actual_kv, 1, slots)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    assert torch.equal(actual, rotary_kv_reference.rotary_kv(q, k, v, rotation, expected_kv, 1, slots))
    assert torch.equal(actual_kv, expected_kv)
