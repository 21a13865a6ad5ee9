"""The kernel that rounds rows to fp8, against torch. What must be written is NaN before."""

from __future__ import annotations

import pytest
import torch

from kvern.kernels.check import Check
from kvern.kernels.fp8_linear.checks import checks


@pytest.mark.parametrize("check", list(checks()), ids=lambda check: check.name)
def test_rounded_rows_and_products_equal_reference(check: Check) -> None:
    check.run(torch.device("cpu"))
