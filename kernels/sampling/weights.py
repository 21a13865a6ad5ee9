"""Probabilities as whole numbers, the same on every device.

A token's weight follows from its own logit, the row's greatest, and the temperature, by additions, multiplications and
one division in float32, each rounded once: no sum and no library's exponential is part of it. So a draw, whose sums
are of whole numbers, is the same wherever it is made.
"""

from __future__ import annotations

import torch
from torch import Tensor

WEIGHT_BITS = 44
"""The weight of a row's most likely token is two to this power. Sums of fewer than 2^19 tokens fit in 63 bits."""

MAX_VOCAB_SIZE = (1 << (63 - WEIGHT_BITS)) - 1

LOG2_E = 1.4426950408889634

LEAST_EXPONENT = -46.0
"""From here on, a weight is 0."""

COEFFICIENTS = (
    0.001326472731307149,
    0.009671512991189957,
    0.05550733581185341,
    0.24022242426872253,
    0.6931470036506653,
    1.0,
)
"""Of a polynomial that is 2^x on [-0.5, 0.5] up to a relative 2e-7, highest power first, each a float32. It was fitted
by least squares, reweighted until the errors were even."""

EXPONENT_BIAS = 127 + WEIGHT_BITS
MANTISSA_BITS = 23


def token_weights(scaled: Tensor) -> Tensor:
    """Return floor(2^44 * exp(scaled)), where exp is the one above: int64.

    scaled: float32, logits less the greatest over the temperature; at most 0, -inf where a token is out.
    """
    exponents = (scaled * LOG2_E).clamp_(min=LEAST_EXPONENT)
    whole = (exponents + 0.5).floor_()
    part = exponents.sub_(whole)
    mantissas = torch.full_like(part, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        mantissas.mul_(part).add_(coefficient)
    powers = (whole.to(torch.int32).add_(EXPONENT_BIAS) << MANTISSA_BITS).view(torch.float32)
    return mantissas.mul_(powers).long()
