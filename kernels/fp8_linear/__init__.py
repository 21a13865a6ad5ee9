"""Matrix product in float8_e4m3fn, with a scale for each row of activations and each row of the weight.

The product is torch's: cuBLAS or CUTLASS on a GPU, oneDNN on a CPU. There it takes any shape, and is slow; a GPU needs
compute capability 8.9, and numbers of inputs and outputs that divide by MULTIPLE.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FP8", "MULTIPLE", "fp8_linear", "quantize_rows"]

FP8 = torch.float8_e4m3fn
MULTIPLE = 16

_MAX = 448.0
"""The greatest number of the type."""

_LONGEST_ROW = 32768


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in float8_e4m3fn, and what each row is to be multiplied by: [num_rows, 1] float32.

    x: [num_rows, size]. The greatest magnitude of a row becomes 448. A row with NaN or infinity has NaN in it still.
    """
    rows = x.to(torch.float32)
    scales = rows.abs().amax(dim=1, keepdim=True) / _MAX
    scales = torch.where(scales > 0, scales, 1.0)
    return (rows / scales).clamp_(-_MAX, _MAX).to(FP8), scales


def fp8_linear(x: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ (weight * weight_scales).T + bias in x's type, x rounded to float8_e4m3fn.

    x: [num_tokens, in]; weight: [out, in] float8_e4m3fn; weight_scales: [out, 1] float32; bias: [out].
    """
    if not len(x):
        return x.new_empty(0, len(weight))
    values, scales = _quantize_activations(x)
    product = torch._scaled_mm(values, weight.t(), scales, weight_scales.t(), out_dtype=x.dtype)
    return product if bias is None else product + bias


def _quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """On a GPU in one kernel, as activations are rounded before each product. It holds a row in registers."""
    if x.device.type == "cpu" or x.shape[1] > _LONGEST_ROW:
        return quantize_rows(x)
    # Imported here: a CPU does without Triton.
    from kvern.kernels.fp8_linear import kernel

    return kernel.quantize_rows(x)
