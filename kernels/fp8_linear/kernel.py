"""Rounding of rows to float8_e4m3fn in Triton: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FP8_MAX = tl.constexpr(448.0)


@triton.jit
def quantize_rows_kernel(x_ptr, values_ptr, scales_ptr, size, stride_x, BLOCK_SIZE: tl.constexpr):
    """scale = max |x| / 448, 1 in a row of zeros; values = x / scale. NaN stays, which a minimum could lose."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_SIZE)
    mask = columns < size
    x = tl.load(x_ptr + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x), axis=0), _FP8_MAX)
    scale = tl.where(scale > 0, scale, 1.0)
    tl.store(scales_ptr + row, scale)
    values = tl.div_rn(x, tl.zeros_like(x) + scale)
    values = tl.where(values > _FP8_MAX, _FP8_MAX, tl.where(values < -_FP8_MAX, -_FP8_MAX, values)).to(tl.float16)
    tl.store(values_ptr + row * size + columns, values.to(values_ptr.dtype.element_ty), mask=mask)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes as in the launcher. Rows are contiguous. Through float16, so that a tie may round otherwise."""
    num_rows, size = x.shape
    values = torch.empty(num_rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    block_size = triton.next_power_of_2(size)
    quantize_rows_kernel[(num_rows,)](
        x,
        values,
        scales,
        size,
        x.stride(0),
        BLOCK_SIZE=block_size,
        num_warps=min(32, max(4, block_size // 1024)),
    )
    return values, scales
