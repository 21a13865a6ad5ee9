"""Gated activations against their definition. What must be written is NaN before."""

from __future__ import annotations

import pytest
import torch

from kvern.kernels.gated_activation import GatedActivation, gated_activation, reference

from .poison import poisoned_outputs

# The interpreter computes sigmoid(-90) by way of exp(90).
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", GatedActivation)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 63), (5, 123), (2, 1500)])
def test_gated_activation_equals_reference(
    num_tokens: int, size: int, activation: GatedActivation, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(size)
    x = (4 * torch.randn(num_tokens, 2 * size + 3, generator=generator)).to(dtype)[:, 3:]
    x[0, 0], x[-1, size - 1] = 90.0, -90.0
    with poisoned_outputs():
        actual = gated_activation(x, activation)
    expected = reference.gated_activation(x, activation)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_gated_activation_of_an_odd_width_raises_value_error() -> None:
    with pytest.raises(ValueError, match=r"x is \[2, 7\]"):
        gated_activation(torch.zeros(2, 7), GatedActivation.SILU)
