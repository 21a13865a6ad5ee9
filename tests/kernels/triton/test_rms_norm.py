"""RMSNorm kernels against their definition. What must be written is NaN before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvern.kernels.rms_norm import add_rms_norm, reference, rms_norm

from .poison import poisoned_outputs

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 1e-3}
"""The interpreter cuts off what bfloat16 cannot hold, where a GPU rounds."""


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 63), (5, 123), (2, 2050)])
def test_norm_equals_reference(num_tokens: int, size: int, unit_offset: bool, dtype: torch.dtype) -> None:
    x, weight = random(num_tokens, size + 1, dtype=dtype)[:, 1:], random(size, dtype=dtype)
    with poisoned_outputs():
        actual = rms_norm(x, weight, 1e-5, unit_offset=unit_offset)
    assert_close(actual, reference.rms_norm(x, weight, 1e-5, unit_offset=unit_offset))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norm_of_heads_amid_others_equals_reference(dtype: torch.dtype) -> None:
    heads, weight = random(7, 9, 48, dtype=dtype), random(48, dtype=dtype)
    with poisoned_outputs():
        actual = rms_norm(heads[:, 2:7], weight, 1e-6)
    assert_close(actual, reference.rms_norm(heads[:, 2:7], weight, 1e-6))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("size", [63, 123, 1000])
def test_norm_of_a_sum_equals_reference_and_gives_the_sum(size: int, unit_offset: bool, dtype: torch.dtype) -> None:
    x, weight = random(5, size, dtype=dtype), random(size, dtype=dtype)
    residual = (3 * random(6, size + 2, dtype=dtype))[1:, 2:]
    with poisoned_outputs():
        actual, total = add_rms_norm(x, residual, weight, 1e-5, unit_offset=unit_offset)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-5, unit_offset=unit_offset)
    assert_close(actual, expected)
    assert_close(total, expected_total)


def test_norm_of_no_tokens_is_empty() -> None:
    assert rms_norm(random(0, 8), random(8), 1e-5).shape == (0, 8)


def test_norm_of_shapes_that_do_not_fit_raises_value_error() -> None:
    with pytest.raises(ValueError, match=r"weight is \[7\]"):
        rms_norm(random(3, 8), random(7), 1e-5)
    with pytest.raises(ValueError, match=r"x is \[3, 8\]"):
        rms_norm(random(8, 3).T, random(8), 1e-5)
    with pytest.raises(ValueError, match=r"residual is \[2, 8\]"):
        add_rms_norm(random(3, 8), random(2, 8), random(8), 1e-5)
