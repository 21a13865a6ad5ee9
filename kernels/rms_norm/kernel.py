"""RMSNorm in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048
"""Elements normed together where a row is shorter, as those of query and key heads are."""


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    num_rows,
    num_heads,
    size,
    stride_xt,
    stride_xh,
    stride_rt,
    stride_rh,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """total = x + residual; out = total / sqrt(mean(total^2) + eps) * (weight or 1 + weight)."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_SIZE)
    mask = (rows < num_rows)[:, None] & (columns < size)[None, :]
    tokens, heads = (rows // num_heads)[:, None], (rows % num_heads)[:, None]
    out_offsets = rows[:, None] * size + columns[None, :]
    x = tl.load(x_ptr + tokens * stride_xt + heads * stride_xh + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(
            residual_ptr + tokens * stride_rt + heads * stride_rh + columns[None, :], mask=mask, other=0.0
        )
        stored = (x + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(total_ptr + out_offsets, stored, mask=mask)
        x = stored.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < size, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        weight += 1.0
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / size + eps)
    out = x * scale[:, None] * weight[None, :]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    total: Tensor | None,
    eps: float,
    unit_offset: bool,
) -> None:
    """Norm [num_tokens, num_heads, size]. out and total are contiguous."""
    num_tokens, num_heads, size = x.shape
    block_size = triton.next_power_of_2(size)
    block_rows = max(1, _TILE // block_size)
    rows = num_tokens * num_heads
    stride_rt, stride_rh = (0, 0) if residual is None else residual.stride()[:2]
    rms_norm_kernel[(triton.cdiv(rows, block_rows),)](
        x,
        residual,
        weight,
        out,
        total,
        rows,
        num_heads,
        size,
        *x.stride()[:2],
        stride_rt,
        stride_rh,
        eps,
        HAS_RESIDUAL=residual is not None,
        UNIT_OFFSET=unit_offset,
        BLOCK_ROWS=block_rows,
        BLOCK_SIZE=block_size,
        num_warps=min(16, max(4, block_size // 512)),
    )
