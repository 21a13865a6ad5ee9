"""RMSNorm kernels against their definition. What must be written is NaN before."""

from __future__ import annotations

import pytest
import torch

from kvern.kernels.check import Check
from kvern.kernels.rms_norm import add_rms_norm, rms_norm
from kvern.kernels.rms_norm.checks import checks, random


@pytest.mark.parametrize("check", list(checks()), ids=lambda check: check.name)
def test_norm_equals_reference(check: Check) -> None:
    check.run(torch.device("cpu"))


def test_norm_of_no_tokens_is_empty() -> None:
    assert rms_norm(random(0, 8), random(8), 1e-5).shape == (0, 8)


def test_norm_of_shapes_that_do_not_fit_raises_value_error() -> None:
    with pytest.raises(ValueError, match=r"weight is \[7\]"):
        rms_norm(random(3, 8), random(7), 1e-5)
    with pytest.raises(ValueError, match=r"x is \[3, 8\]"):
        rms_norm(random(8, 3).T, random(8), 1e-5)
    with pytest.raises(ValueError, match=r"residual is \[2, 8\]"):
        add_rms_norm(random(3, 8), random(2, 8), random(8), 1e-5)
