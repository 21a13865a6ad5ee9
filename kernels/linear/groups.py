"""Weights rounded to 8 or 4 bits in groups of 32 inputs.

The groups are those of llama.cpp's Q8_0 and Q4_1, so that weights which were stored so come out as they were. An
integer of 8 bits is signed, and multiplied by a scale; one of 4 bits is not, and a minimum is added too. Scales and
minima are in float16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Inputs that share a scale."""


@dataclass(frozen=True, slots=True)
class Groups:
    """A rounded weight: values * scales + minima."""

    values: Tensor
    """[out, num_groups, GROUP] int8, or uint8 up to 15."""
    scales: Tensor
    """[out, num_groups, 1] float16."""
    minima: Tensor | None
    """As the scales. None: 0."""


def in_8_bits(weight: Tensor) -> Groups:
    """Round a weight, [out, in], to integers from -127 to 127, the greatest magnitude of a group to 127."""
    grouped = _grouped(weight)
    scales = (grouped.abs().amax(dim=2, keepdim=True) / 127).to(torch.float16)
    return Groups(_quotient(grouped, scales).clamp_(-127, 127).to(torch.int8), scales, None)


def in_4_bits(weight: Tensor) -> Groups:
    """Round a weight, [out, in], to integers from 0 to 15, the least of a group to 0 and the greatest to 15."""
    grouped = _grouped(weight)
    least, greatest = grouped.aminmax(dim=2, keepdim=True)
    scales, minima = ((greatest - least) / 15).to(torch.float16), least.to(torch.float16)
    values = _quotient(grouped - minima.to(torch.float32), scales).clamp_(0, 15)
    return Groups(values.to(torch.uint8), scales, minima)


def _grouped(weight: Tensor) -> Tensor:
    return weight.to(torch.float32).reshape(len(weight), -1, GROUP)


def _quotient(grouped: Tensor, scales: Tensor) -> Tensor:
    """Return the nearest integers; 0 where the scale is 0."""
    return (grouped / torch.where(scales > 0, scales, torch.inf).to(torch.float32)).round_()
