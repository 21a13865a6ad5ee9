"""Linear against its definition in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvern.kernels.linear import can_pack, linear, pack
from kvern.kernels.linear.packed import OneDnnWeight, PackedWeight

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


needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="weights are not packed")


@needs_onednn
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 576), (33, 576), (96, 60)])
@pytest.mark.parametrize("packer", [pack, OneDnnWeight])
def test_product_with_a_packed_weight_equals_that_in_float64_in_every_batch(
    packer: Callable[[Tensor], PackedWeight], out_features: int, in_features: int, has_bias: bool
) -> None:
    """D17. The batches end in every height of a tile."""
    generator = torch.Generator().manual_seed(out_features)
    x = torch.randn(220, in_features, generator=generator).bfloat16()
    weight = (torch.randn(out_features, in_features, generator=generator) / in_features**0.5).bfloat16()
    bias = torch.randn(out_features, generator=generator).bfloat16() if has_bias else None
    assert can_pack(weight)
    packed = packer(weight)
    assert (packed.out_features, packed.in_features, packed.nbytes) == (out_features, in_features, weight.nbytes)
    whole = packed.product(x, bias)
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    torch.testing.assert_close(whole.double(), expected, atol=2**-8, rtol=2**-8)
    for begin, count in ((0, 1), (219, 1), (3, 2), (0, 3), (7, 7), (1, 27), (5, 97), (2, 200)):
        assert torch.equal(packed.product(x[begin : begin + count], bias), whole[begin : begin + count])


@needs_onednn
def test_product_of_a_packed_weight_over_a_slice_of_a_wider_tensor_equals_its_copy() -> None:
    wide = torch.randn(5, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = pack(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16())
    assert torch.equal(packed.product(wide[:, 40:104], None), packed.product(wide[:, 40:104].contiguous(), None))


def test_weights_of_other_types_are_left_as_they_are() -> None:
    assert not can_pack(torch.zeros(64, 64))
    assert not can_pack(torch.zeros(64, 64, dtype=torch.float16))
