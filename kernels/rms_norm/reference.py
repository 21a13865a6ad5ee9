"""The definition of RMSNorm, as the engine's layers write it: what the kernel is tested against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """Return the norm over the last dimension, computed in float32."""
    weight = weight.to(torch.float32) + (1.0 if unit_offset else 0.0)
    return functional.rms_norm(x.to(torch.float32), weight.shape, weight, eps).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the norm of the sum, and the sum."""
    total = x + residual
    return rms_norm(total, weight, eps, unit_offset=unit_offset), total
