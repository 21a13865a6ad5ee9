"""Linear against its definition in float64."""

from __future__ import annotations

import pytest
import torch

from kvern.kernels.linear import linear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 123])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_equals_product_and_sum_in_float64(dtype: torch.dtype, num_tokens: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 123, generator=generator).to(dtype)
    weight = (torch.randn(65, 123, generator=generator) / 123**0.5).to(dtype)
    bias = torch.randn(65, generator=generator).to(dtype) if has_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(linear(x, weight, bias).double(), expected, atol=tolerance, rtol=tolerance)


def test_linear_over_a_slice_of_a_wider_tensor_equals_its_copy() -> None:
    wide = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(7, 60, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(linear(wide[:, 40:100], weight), linear(wide[:, 40:100].clone(), weight))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="another library sums in an order of its own")
@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (576, 1536), (3072, 576), (65, 123)])
def test_linear_in_float32_gives_a_row_the_same_bits_in_every_batch(out_features: int, in_features: int) -> None:
    """D17: what a request draws must not depend on who else is served."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, in_features, generator=generator)
    weight = torch.randn(out_features, in_features, generator=generator)
    whole = linear(x, weight)
    for begin, count in ((0, 1), (7, 1), (199, 1), (0, 2), (3, 5), (10, 16), (1, 33), (5, 128)):
        assert torch.equal(linear(x[begin : begin + count], weight), whole[begin : begin + count])
