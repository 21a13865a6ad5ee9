"""Rotation of queries and keys, and the KV write, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_FP8_MAX = tl.constexpr(448.0)


@triton.jit
def load_rotated(heads_ptr, cos, sin, head_dim, rotary_dim, offsets, dims, mask, HAS_ROTATION: tl.constexpr):
    """Return x * cos + (x with its halves swapped) * sin: [BLOCK_HEADS, BLOCK_DIM] float32."""
    x = tl.load(heads_ptr + offsets[:, None] * head_dim + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_ROTATION:
        half = rotary_dim // 2
        partner = tl.where(dims < half, dims + half, dims - half)
        partner_mask = mask & (dims < rotary_dim)[None, :]
        swapped = tl.load(heads_ptr + offsets[:, None] * head_dim + partner[None, :], mask=partner_mask, other=0.0)
        x = x * cos[None, :] + swapped.to(tl.float32) * sin[None, :]
    return x


@triton.jit
def store_kv(kv_ptr, offsets, values, scales_ptr, heads, mask, IS_FP8: tl.constexpr):
    """Store [BLOCK_HEADS, BLOCK_DIM] of keys or values. What fp8 cannot hold becomes its greatest number."""
    if IS_FP8:
        scales = tl.load(scales_ptr + heads, mask=mask, other=1.0)
        values = tl.minimum(tl.maximum(values / scales, -_FP8_MAX), _FP8_MAX).to(tl.float16)
    tl.store(kv_ptr + offsets, values.to(kv_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["layer"])
def rotary_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    kv_ptr,
    slots_ptr,
    scales_ptr,
    layer,
    num_layers,
    num_heads,
    num_kv_heads,
    head_dim,
    rotary_dim,
    block_size,
    stride_qt,
    stride_kt,
    stride_vt,
    stride_block,
    stride_layer,
    stride_part,
    stride_head,
    HAS_ROTATION: tl.constexpr,
    IS_FP8: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """For one token: out = rotated q; kv[slot] = rotated k, v. Rotated x is x * cos + swapped x * sin."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_DIM)
    in_rotation = dims < rotary_dim
    cos, sin = 1.0, 0.0
    if HAS_ROTATION:
        cos = tl.load(cos_ptr + token * rotary_dim + dims, mask=in_rotation, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * rotary_dim + dims, mask=in_rotation, other=0.0).to(tl.float32)
    heads = tl.arange(0, BLOCK_HEADS)
    mask = (heads < num_heads)[:, None] & (dims < head_dim)[None, :]
    q = load_rotated(q_ptr + token * stride_qt, cos, sin, head_dim, rotary_dim, heads, dims, mask, HAS_ROTATION)
    out_offsets = heads[:, None] * head_dim + dims[None, :]
    tl.store(out_ptr + token * num_heads * head_dim + out_offsets, q.to(out_ptr.dtype.element_ty), mask=mask)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        kv_heads = tl.arange(0, BLOCK_KV_HEADS)
        kv_mask = (kv_heads < num_kv_heads)[:, None] & (dims < head_dim)[None, :]
        k = load_rotated(
            k_ptr + token * stride_kt, cos, sin, head_dim, rotary_dim, kv_heads, dims, kv_mask, HAS_ROTATION
        )
        v_offsets = kv_heads[:, None] * head_dim + dims[None, :]
        v = tl.load(v_ptr + token * stride_vt + v_offsets, mask=kv_mask, other=0.0).to(tl.float32)
        first = slot // block_size * stride_block + layer.to(tl.int64) * stride_layer + slot % block_size * head_dim
        offsets = first + kv_heads.to(tl.int64)[:, None] * stride_head + dims[None, :]
        k_scales, v_scales = layer * num_kv_heads, (num_layers + layer) * num_kv_heads
        store_kv(kv_ptr, offsets, k, scales_ptr, k_scales + kv_heads[:, None], kv_mask, IS_FP8)
        store_kv(kv_ptr, offsets + stride_part, v, scales_ptr, v_scales + kv_heads[:, None], kv_mask, IS_FP8)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    out: Tensor,
    kv: Tensor,
    layer: int,
    slot_mapping: Tensor,
    scales: Tensor | None,
) -> None:
    """Shapes as in the launcher."""
    num_tokens, num_heads, head_dim = q.shape
    cos, sin = rotation or (None, None)
    stride_block, stride_layer, stride_part, stride_head = kv.stride()[:4]
    rotary_kv_kernel[(num_tokens,)](
        q,
        k,
        v,
        cos,
        sin,
        out,
        kv,
        slot_mapping,
        scales,
        layer,
        kv.shape[1],
        num_heads,
        kv.shape[3],
        head_dim,
        0 if cos is None else cos.shape[-1],
        kv.shape[4],
        q.stride(0),
        k.stride(0),
        v.stride(0),
        stride_block,
        stride_layer,
        stride_part,
        stride_head,
        HAS_ROTATION=rotation is not None,
        IS_FP8=scales is not None,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        BLOCK_KV_HEADS=triton.next_power_of_2(kv.shape[3]),
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        num_warps=min(16, max(4, triton.next_power_of_2(num_heads * head_dim) // 512)),
    )
