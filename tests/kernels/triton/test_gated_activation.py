"""Gated activations against their definition. What must be written is NaN before."""

from __future__ import annotations

import pytest
import torch

from kvern.kernels.check import Check
from kvern.kernels.gated_activation import GatedActivation, gated_activation
from kvern.kernels.gated_activation.checks import checks

# The interpreter computes sigmoid(-90) by way of exp(90).
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


@pytest.mark.parametrize("check", list(checks()), ids=lambda check: check.name)
def test_gated_activation_equals_reference(check: Check) -> None:
    check.run(torch.device("cpu"))


def test_gated_activation_of_an_odd_width_raises_value_error() -> None:
    with pytest.raises(ValueError, match=r"x is \[2, 7\]"):
        gated_activation(torch.zeros(2, 7), GatedActivation.SILU)
