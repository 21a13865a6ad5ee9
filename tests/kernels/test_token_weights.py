"""Probabilities as whole numbers: what draws rest on, on every device."""

from __future__ import annotations

import math

import torch

from kvern.kernels.sampling import token_weights, weights


def test_weights_on_a_cpu_equal_those_in_torch_and_are_close_to_the_exponential() -> None:
    scaled = -torch.cat((torch.linspace(0, 40, 20_001), torch.tensor([0.0, 1e30, math.inf])))
    actual = token_weights(scaled)
    assert torch.equal(actual, weights.token_weights(scaled))
    assert actual[-3:].tolist() == [2**44, 0, 0]
    exact = scaled.double().exp() * 2.0**44
    torch.testing.assert_close(actual.double(), exact, atol=1.0, rtol=3e-6)


def test_coefficients_are_float32_numbers() -> None:
    """So no device rounds them otherwise."""
    assert [float(torch.tensor(each)) for each in weights.COEFFICIENTS] == list(weights.COEFFICIENTS)
