"""What grammars allow, applied to logits."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_token_mask"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def apply_token_mask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set logits of tokens that are not allowed to -inf, in place.

    logits: [num_rows, vocab_size], rows contiguous; rows: [num_masked] int64, the row of the logits that each row of
    bits is for, -1 where it is for none, no row twice; bits: [num_masked, ceil(vocab_size / 32)] int32, bit i % 32 of
    word i // 32 set where token i is allowed.
    Raises ValueError for shapes, strides or types that do not fit.
    """
    if logits.dim() != 2 or logits.dtype not in _DTYPES or logits.stride(1) != 1:
        raise ValueError(f"logits are {_describe(logits)}; 2 dimensions of a float type are needed, rows contiguous")
    shape = (len(rows), -(-logits.shape[1] // 32))
    if bits.shape != shape or bits.dtype is not torch.int32 or not bits.is_contiguous():
        raise ValueError(f"bits are {_describe(bits)}; contiguous {list(shape)} of torch.int32 is needed")
    if rows.dim() != 1 or rows.dtype is not torch.int64 or not rows.is_contiguous():
        raise ValueError(f"rows are {_describe(rows)}; contiguous [num_masked] of torch.int64 is needed")
    # Imported here: a CPU does without Triton.
    from kvern.kernels.token_mask.kernel import launch

    if len(rows):
        launch(logits, rows, bits)


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"
