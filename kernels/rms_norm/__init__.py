"""RMSNorm, alone and with the residual added first. Source: arXiv:1910.07467."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_rms_norm", "rms_norm"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32.

    x: [num_tokens, size] or [num_tokens, num_heads, size], any strides but 1 in the last dimension; weight: [size].
    unit_offset: times (1 + weight), as Gemma does. Returns a contiguous tensor of x's shape and type.
    Raises ValueError for shapes, strides or types that do not fit.
    """
    _check(x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, None, eps, unit_offset)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and the sum itself, rounded to x's type before it is normed.

    residual: shape and type of x. The rest is as in `rms_norm`.
    """
    _check(x, weight)
    if residual.shape != x.shape or residual.dtype is not x.dtype or residual.stride(-1) != 1:
        raise ValueError(f"residual is {_describe(residual)}; {_describe(x)} is needed, its rows contiguous")
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, residual, weight, out, total, eps, unit_offset)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    total: Tensor | None,
    eps: float,
    unit_offset: bool,
) -> None:
    # Imported here: a CPU does without Triton.
    from kvern.kernels.rms_norm.kernel import launch

    if x.numel():
        x, residual = _by_head(x), None if residual is None else _by_head(residual)
        launch(x, residual, weight, out, total, eps, unit_offset)


def _by_head(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x[:, None]


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dim() not in (2, 3) or x.dtype not in _DTYPES or x.stride(-1) != 1:
        raise ValueError(f"x is {_describe(x)}; 2 or 3 dimensions of a float type are needed, its rows contiguous")
    if weight.shape != x.shape[-1:] or weight.dtype not in _DTYPES or not weight.is_contiguous():
        raise ValueError(f"weight is {_describe(weight)}; contiguous [{x.shape[-1]}] is needed")


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"
