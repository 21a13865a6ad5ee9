"""What lies between the projection of a layer's queries, keys and values, and its attention, in one pass.

Queries and keys are rotated (RoFormer, arXiv:2104.09864), keys and values stored in the paged KV cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotary_kv"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FP8 = torch.float8_e4m3fn


def rotary_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    kv: Tensor,
    layer: int,
    slot_mapping: Tensor,
    scales: Tensor | None = None,
) -> Tensor:
    """Return the rotated queries: [num_tokens, num_heads, head_dim], contiguous.

    q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim], heads contiguous; rotation: the
    cosine, and the sine with the sign that it has in either half, each [num_tokens, 1, rotary_dim] of q's type, None
    where a layer does not rotate; kv: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], a head's slice
    contiguous, of q's type or float8_e4m3fn; slot_mapping: [num_tokens] int64, block * block_size + offset, -1 where
    nothing is stored; scales: [2, num_layers, num_kv_heads] float32, what keys and values are divided by before they
    become fp8, and only then.
    Raises ValueError for shapes, strides or types that do not fit.
    """
    _check_heads(q, k, v, kv)
    _check_rotation(q, rotation)
    _check_scales(kv, scales)
    if slot_mapping.shape != (len(q),) or slot_mapping.dtype is not torch.int64 or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping is {_describe(slot_mapping)}; contiguous [{len(q)}] of torch.int64 is needed")
    # Imported here: a CPU does without Triton.
    from kvern.kernels.rotary_kv.kernel import launch

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if len(q):
        launch(q, k, v, rotation, out, kv, layer, slot_mapping, scales)
    return out


def _check_heads(q: Tensor, k: Tensor, v: Tensor, kv: Tensor) -> None:
    if kv.dim() != 6 or not kv[0, 0, 0].is_contiguous():
        raise ValueError(f"kv is {_describe(kv)}; 6 dimensions are needed, a head's slice of a block contiguous")
    shape = (len(q), kv.shape[3], kv.shape[5])
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape != shape or tensor.dtype is not q.dtype or tensor.stride()[1:] != (kv.shape[5], 1):
            raise ValueError(f"{name} is {_describe(tensor)}; {list(shape)} of {q.dtype} is needed, heads contiguous")
    if q.dim() != 3 or q.shape[2] != kv.shape[5] or q.dtype not in _DTYPES or q.stride()[1:] != (kv.shape[5], 1):
        raise ValueError(f"q is {_describe(q)}; [num_tokens, num_heads, {kv.shape[5]}] is needed, heads contiguous")
    if kv.dtype not in (q.dtype, _FP8):
        raise ValueError(f"kv is of {kv.dtype}; {q.dtype} or {_FP8} is needed")


def _check_rotation(q: Tensor, rotation: tuple[Tensor, Tensor] | None) -> None:
    for name, tensor in zip(("cosine", "sine"), rotation or (), strict=False):
        rotary_dim = tensor.shape[-1]
        if tensor.shape != (len(q), 1, rotary_dim) or rotary_dim > q.shape[2] or rotary_dim % 2:
            raise ValueError(f"the {name} is {_describe(tensor)}; [{len(q)}, 1, even, at most {q.shape[2]}] is needed")
        if tensor.dtype is not q.dtype or not tensor.is_contiguous():
            raise ValueError(f"the {name} is {_describe(tensor)}; contiguous {q.dtype} is needed")


def _check_scales(kv: Tensor, scales: Tensor | None) -> None:
    if (scales is not None) != (kv.dtype is _FP8):
        raise ValueError(f"kv is of {kv.dtype}; scales go with {_FP8}, and with nothing else")
    shape = (2, kv.shape[1], kv.shape[3])
    if scales is None:
        return
    if scales.shape != shape or scales.dtype is not torch.float32 or not scales.is_contiguous():
        raise ValueError(f"scales are {_describe(scales)}; contiguous {list(shape)} of torch.float32 is needed")


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"
