"""The definition of rounding to fp8 and of its product, one number at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MAX, _MANTISSA_BITS, _LEAST_EXPONENT = 448.0, 3, -6


def round_to_fp8(number: float) -> float:
    """Return the nearest number of float8_e4m3fn, of two the one with an even last bit. Source: arXiv:2209.05433."""
    if math.isnan(number) or number == 0:
        return number
    exponent = max(math.frexp(number)[1] - 1, _LEAST_EXPONENT)
    step = 2.0 ** (exponent - _MANTISSA_BITS)
    return math.copysign(min(abs(round(number / step) * step), _MAX), number)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded numbers in float32, and the scales. Shapes are those of the launcher."""
    scales = torch.tensor([[max(abs(number) for number in row) / _MAX or 1.0] for row in x.tolist()])
    divided = (x.to(torch.float32) / scales).tolist()
    return torch.tensor([[round_to_fp8(number) for number in row] for row in divided]), scales


def fp8_linear(x: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product in float64. Shapes are those of the launcher."""
    values, scales = quantize_rows(x)
    product = (values.double() * scales) @ (weight.double() * weight_scales).T
    return product if bias is None else product + bias.double()
