"""SiLU or GELU of a gate, times what it gates, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x * tl.sigmoid(x)


@triton.jit
def gelu_tanh(x):
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), where (1 + tanh(z)) / 2 is sigmoid(2 z)."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def gated_activation_kernel(x_ptr, out_ptr, size, stride_xt, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    """out = activation(x[:size]) * x[size:] for one token and BLOCK columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(x_ptr + token * stride_xt + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride_xt + size + columns, mask=mask, other=0.0).to(tl.float32)
    activated = silu(gate) if IS_SILU else gelu_tanh(gate)
    tl.store(out_ptr + token * size + columns, (activated * up).to(out_ptr.dtype.element_ty), mask=mask)


def launch(x: Tensor, out: Tensor, *, is_silu: bool) -> None:
    """x: [num_tokens, 2 * size]; out: [num_tokens, size] contiguous."""
    num_tokens, size = out.shape
    grid = (num_tokens, triton.cdiv(size, _BLOCK))
    gated_activation_kernel[grid](x, out, size, x.stride(0), IS_SILU=is_silu, BLOCK=_BLOCK, num_warps=4)
