"""Attention of sequences with one query token: splits of a fixed size, then their sum in order."""

from __future__ import annotations

import triton
import triton.language as tl

from kvern.kernels.paged_attention.tile import accumulate, find_rows, load_tile, score


@triton.jit(
    do_not_specialize=["num_seqs", "window", "stride_table"],
    do_not_specialize_on_alignment=[
        "scales_ptr",
        "block_table_ptr",
        "cu_query_lens_ptr",
        "context_lens_ptr",
        "starts_ptr",
        "items_ptr",
    ],
)
def decode_kernel(
    q_ptr,
    kv_ptr,
    scales_ptr,
    partial_ptr,
    logsum_ptr,
    block_table_ptr,
    cu_query_lens_ptr,
    context_lens_ptr,
    starts_ptr,
    items_ptr,
    num_seqs,
    window,
    inner_scale,
    outer_scale,
    stride_qm,
    stride_qh,
    stride_block,
    stride_part,
    stride_head,
    stride_scale,
    stride_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """partial[item, head] = softmax(q @ k.T) @ v over a split; logsum = log2 of the sum of 2^score.

    A fixed number of programs strides over items times KV heads: one launch serves every context. A split is SPLIT
    tokens from a multiple of SPLIT on, whatever else is in the batch.
    """
    num_units = tl.load(starts_ptr + num_seqs) * NUM_KV_HEADS
    rows = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    q_mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        item = unit // NUM_KV_HEADS
        kv_head = unit % NUM_KV_HEADS
        heads = kv_head * GROUP + rows
        sequence = tl.load(items_ptr + 2 * item).to(tl.int64)
        split = tl.load(items_ptr + 2 * item + 1)
        context_len = tl.load(context_lens_ptr + sequence)
        token = tl.load(cu_query_lens_ptr + sequence).to(tl.int64)
        first = tl.maximum(context_len - window, 0)
        begin = tl.maximum(split * SPLIT, first // BLOCK_N * BLOCK_N)
        end = tl.minimum((split + 1) * SPLIT, context_len)
        table_ptr = block_table_ptr + sequence * stride_table
        k_ptr = kv_ptr + kv_head.to(tl.int64) * stride_head
        score_scale, value_scale = outer_scale, 1.0
        tanh_scale = inner_scale
        if HAS_SCALES:
            k_scale = tl.load(scales_ptr + kv_head)
            value_scale = tl.load(scales_ptr + stride_scale + kv_head)
            if HAS_SOFTCAP:
                tanh_scale = inner_scale * k_scale
            else:
                score_scale = outer_scale * k_scale
        q = tl.load(q_ptr + token * stride_qm + heads[:, None] * stride_qh + dims[None, :], mask=q_mask, other=0.0)
        q = q.to(COMPUTE_DTYPE)
        attended = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
        maximum = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_G], dtype=tl.float32)
        for at in range(begin, end, BLOCK_N):
            positions = at + tl.arange(0, BLOCK_N)
            seen = (positions >= first) & (positions < end)
            at_rows = find_rows(table_ptr, positions, seen, stride_block, BLOCK_SIZE, HEAD_DIM)
            k = load_tile(k_ptr, at_rows, seen, HEAD_DIM, BLOCK_D, COMPUTE_DTYPE)
            v = load_tile(k_ptr + stride_part, at_rows, seen, HEAD_DIM, BLOCK_D, COMPUTE_DTYPE)
            scores = score(q, k, tanh_scale, HAS_SOFTCAP, PRECISION)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            attended, maximum, total = accumulate(
                attended, maximum, total, scores, v, score_scale, COMPUTE_DTYPE, PRECISION
            )
        out_rows = item.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
        attended = attended * (value_scale / total)[:, None]
        tl.store(partial_ptr + out_rows[:, None] * HEAD_DIM + dims[None, :], attended, mask=q_mask)
        tl.store(logsum_ptr + out_rows, maximum + tl.log2(total), mask=rows < GROUP)


@triton.jit(do_not_specialize_on_alignment=["cu_query_lens_ptr", "starts_ptr"])
def combine_kernel(
    partial_ptr,
    logsum_ptr,
    out_ptr,
    cu_query_lens_ptr,
    starts_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[token of s] = sum of partial[i] * 2^logsum[i] over the splits i of s, over the sum of 2^logsum[i].

    Splits are added in order, BLOCK_S at a time. A sequence of length 0 gets zeros, one with other than one query
    token is not touched.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.load(cu_query_lens_ptr + sequence).to(tl.int64)
    if tl.load(cu_query_lens_ptr + sequence + 1) - token != 1:
        return
    begin = tl.load(starts_ptr + sequence)
    end = tl.load(starts_ptr + sequence + 1)
    dims = tl.arange(0, BLOCK_D)
    attended = tl.zeros([BLOCK_D], dtype=tl.float32)
    maximum = float("-inf")
    total = 0.0
    for at in range(begin, end, BLOCK_S):
        items = at + tl.arange(0, BLOCK_S)
        rows = items.to(tl.int64) * NUM_HEADS + head
        mask = (items < end)[:, None] & (dims < HEAD_DIM)[None, :]
        logsums = tl.load(logsum_ptr + rows, mask=items < end, other=float("-inf"))
        partial = tl.load(partial_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(logsums))
        weights = tl.exp2(logsums - new_maximum)
        fading = tl.exp2(maximum - new_maximum)
        attended = attended * fading + tl.sum(partial * weights[:, None], axis=0)
        total = total * fading + tl.sum(weights)
        maximum = new_maximum
    attended = attended / tl.where(total == 0.0, 1.0, total)
    row = token * NUM_HEADS + head
    tl.store(out_ptr + row * HEAD_DIM + dims, attended.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
