"""fp8 rounding and products against their definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvern.kernels.fp8_linear import FP8, fp8_linear, quantize_rows, reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (16, 123)])
def test_quantized_rows_are_those_of_the_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows of all magnitudes: what is far below a row's greatest number is rounded in steps of 2^-9."""
    x = (random(*shape) * random(*shape, seed=1).exp() ** 3).to(dtype)
    values, scales = quantize_rows(x)
    expected_values, expected_scales = reference.quantize_rows(x)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    torch.testing.assert_close(values.float(), expected_values, rtol=0, atol=0)
    assert values.float().abs().amax(1).eq(448).all(), "the whole range is used"


def test_rows_of_zeros_and_of_tiny_numbers_stay_finite() -> None:
    values, scales = quantize_rows(torch.tensor([[0.0, 0.0, -0.0], [1e-45, 0.0, 0.0], [3e38, -3e38, 1.0]]))
    assert (values.float() * scales).isfinite().all()
    assert scales[0] == 1
    assert (values[0].float() == 0).all()
    torch.testing.assert_close((values.float() * scales)[2], torch.tensor([3e38, -3e38, 0.0]))


def test_numbers_beyond_the_scale_are_held_to_the_greatest() -> None:
    """The quotient may round to a little more than 448, which must not become NaN."""
    x = random(200, 7) * torch.logspace(-30, 30, 200)[:, None]
    assert quantize_rows(x)[0].float().abs().max() == 448


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_row_that_is_not_finite_stays_so_and_alone(poison: float) -> None:
    x = random(3, 32)
    x[1, 5] = poison
    product = fp8_linear(x, *quantize_rows(random(16, 32, seed=1)))
    assert product.isfinite().all(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_tokens", "size", "out_size"), [(1, 63, 65), (5, 123, 1), (33, 64, 80)])
def test_product_equals_that_of_the_rounded_numbers(
    num_tokens: int, size: int, out_size: int, has_bias: bool, dtype: torch.dtype
) -> None:
    x, bias = random(num_tokens, size, dtype=dtype), random(out_size, dtype=dtype, seed=2) if has_bias else None
    weight, scales = quantize_rows(random(out_size, size, seed=1))
    product = fp8_linear(x, weight, scales, bias)
    expected = reference.fp8_linear(x, weight, scales, bias)
    assert product.dtype is dtype
    tolerance = TOLERANCE[dtype] * float(expected.abs().max())
    torch.testing.assert_close(product.double(), expected, atol=tolerance, rtol=0)


def test_product_of_no_tokens_is_empty() -> None:
    weight, scales = quantize_rows(random(16, 32))
    assert fp8_linear(torch.empty(0, 32, dtype=torch.bfloat16), weight, scales).shape == (0, 16)
    assert weight.dtype is FP8
