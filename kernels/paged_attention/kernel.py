"""Storing a step's keys and values, and the list of decode work."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr", "scales_ptr"])
def write_kv_kernel(
    k_ptr,
    v_ptr,
    kv_ptr,
    scales_ptr,
    slot_mapping_ptr,
    stride_km,
    stride_kh,
    stride_vm,
    stride_vh,
    stride_block,
    stride_part,
    stride_head,
    stride_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """kv[slot] = k, v of one token, all heads; divided by the head's scale and held to what fp8 holds, if scaled."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    heads = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < NUM_HEADS) & (dims < HEAD_DIM)
    k = tl.load(k_ptr + token * stride_km + heads * stride_kh + dims, mask=mask, other=0.0)
    v = tl.load(v_ptr + token * stride_vm + heads * stride_vh + dims, mask=mask, other=0.0)
    if HAS_SCALES:
        k_scale = tl.load(scales_ptr + heads, mask=heads < NUM_HEADS, other=1.0)
        v_scale = tl.load(scales_ptr + stride_scale + heads, mask=heads < NUM_HEADS, other=1.0)
        k = hold(k.to(tl.float32) / k_scale)
        v = hold(v.to(tl.float32) / v_scale)
    at = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * HEAD_DIM + heads * stride_head + dims
    tl.store(kv_ptr + at, k.to(kv_ptr.dtype.element_ty), mask=mask)
    tl.store(kv_ptr + at + stride_part, v.to(kv_ptr.dtype.element_ty), mask=mask)


@triton.jit
def hold(x):
    """Hold x to [-448, 448], the range of e4m3, as float16, which fp8 is converted from. NaN stays NaN."""
    x = tl.where(x > 448.0, 448.0, x)
    return tl.where(x < -448.0, -448.0, x).to(tl.float16)


@triton.jit(
    do_not_specialize=["num_seqs", "window"],
    do_not_specialize_on_alignment=["cu_query_lens_ptr", "context_lens_ptr", "starts_ptr", "items_ptr"],
)
def list_splits_kernel(
    cu_query_lens_ptr,
    context_lens_ptr,
    starts_ptr,
    items_ptr,
    num_seqs,
    window,
    SPLIT: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
):
    """starts = exclusive sum of each sequence's number of splits; items[starts[s] + i] = (s, first split of s + i).

    A sequence has splits if it has one query token, and as many as its context within the window touches.
    """
    sequence = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_SEQS)
    inside = lanes < num_seqs
    context_lens = tl.load(context_lens_ptr + lanes, mask=inside, other=0)
    begins = tl.load(cu_query_lens_ptr + lanes, mask=inside, other=0)
    ends = tl.load(cu_query_lens_ptr + lanes + 1, mask=inside, other=0)
    firsts = tl.maximum(context_lens - window, 0) // SPLIT
    counts = tl.where(ends - begins == 1, (context_lens + SPLIT - 1) // SPLIT - firsts, 0)
    start = tl.sum(tl.where(lanes < sequence, counts, 0))
    count = tl.sum(tl.where(lanes == sequence, counts, 0))
    first = tl.sum(tl.where(lanes == sequence, firsts, 0))
    tl.store(starts_ptr + sequence, start)
    if sequence == num_seqs - 1:
        tl.store(starts_ptr + num_seqs, start + count)
    for at in range(0, count, BLOCK_ITEMS):
        offsets = at + tl.arange(0, BLOCK_ITEMS)
        item_ptrs = items_ptr + (start + offsets).to(tl.int64) * 2
        tl.store(item_ptrs, tl.zeros_like(offsets) + sequence, mask=offsets < count)
        tl.store(item_ptrs + 1, first + offsets, mask=offsets < count)
