"""Probabilities as whole numbers: what draws rest on, on every device. And the likeliest token on a CPU."""

from __future__ import annotations

import math

import torch

from kvern.kernels.sampling import greatest, token_weights, weights


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


def test_greatest_of_a_row_is_found_by_the_lowest_id_that_has_it() -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).float()
    logits[1, [10, 1030, 4999]] = 9.0
    logits[2, [1500, 1400]] = 9.0
    logits[3] = -1.0
    logits[3, [700, 4000]] = torch.tensor([-0.0, 0.0])
    logits[4] = float("-inf")
    best, token_ids = greatest(logits)
    assert torch.equal(best, logits.amax(dim=-1))
    assert token_ids[1:5].tolist() == [10, 1400, 700, 0]
    assert torch.equal(logits.gather(1, token_ids[:, None])[:, 0], best)
    assert torch.equal(greatest(logits[5:])[1], token_ids[5:])


def test_greatest_of_a_row_with_a_nan_is_nan() -> None:
    for nan in (math.nan, math.copysign(math.nan, -1.0)):
        logits = torch.zeros(2, 3000)
        logits[0, 2500] = nan
        assert greatest(logits)[0].isnan().tolist() == [True, False]
