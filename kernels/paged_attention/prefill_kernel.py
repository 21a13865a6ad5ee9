"""Attention of sequences with several query tokens, in tiles of query tokens times the heads of a group."""

from __future__ import annotations

import triton
import triton.language as tl

from kvern.kernels.paged_attention.tile import accumulate, find_rows, load_tile, score


@triton.jit
def find_sequence(cu_query_lens_ptr, tile, num_seqs, TOKENS: tl.constexpr):
    """Return the sequence that a tile belongs to, where sequence s begins with tile cu_query_lens[s] // TOKENS + s.

    Those tiles are enough for every sequence, whatever the lengths, and some are left over.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_query_lens_ptr + middle) // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def attend_tiles(
    attended,
    maximum,
    total,
    q,
    query_positions,
    begin,
    end,
    table_ptr,
    k_ptr,
    stride_block,
    stride_part,
    window,
    tanh_scale,
    score_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend the tokens at [begin, end), begin a multiple of BLOCK_N. Not masked: every row sees all of them."""
    for at in range(begin, end, BLOCK_N):
        positions = at + tl.arange(0, BLOCK_N)
        seen = positions < end
        if MASKED:
            seen = seen & (positions > tl.min(query_positions) - window)
        at_rows = find_rows(table_ptr, positions, seen, stride_block, BLOCK_SIZE, HEAD_DIM)
        k = load_tile(k_ptr, at_rows, seen, HEAD_DIM, BLOCK_D, COMPUTE_DTYPE)
        v = load_tile(k_ptr + stride_part, at_rows, seen, HEAD_DIM, BLOCK_D, COMPUTE_DTYPE)
        scores = score(q, k, tanh_scale, HAS_SOFTCAP, PRECISION)
        if MASKED:
            distance = query_positions[:, None] - positions[None, :]
            scores = tl.where((distance >= 0) & (distance < window), scores, float("-inf"))
        attended, maximum, total = accumulate(
            attended, maximum, total, scores, v, score_scale, COMPUTE_DTYPE, PRECISION
        )
    return attended, maximum, total


@triton.jit(
    do_not_specialize=["num_seqs", "window", "stride_table"],
    do_not_specialize_on_alignment=["scales_ptr", "block_table_ptr", "cu_query_lens_ptr", "context_lens_ptr"],
)
def prefill_kernel(
    q_ptr,
    kv_ptr,
    scales_ptr,
    out_ptr,
    block_table_ptr,
    cu_query_lens_ptr,
    context_lens_ptr,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMPUTE_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """out = softmax(q @ k.T) @ v for BLOCK_M // GROUP query tokens of one sequence and the heads of one KV head.

    Tiles of keys begin at multiples of BLOCK_N, so a row sees the same tiles however its sequence is cut.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    # Of a sequence's tiles the last have the longest contexts: they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = find_sequence(cu_query_lens_ptr, tile, num_seqs, TOKENS)
    first_token = tl.load(cu_query_lens_ptr + sequence)
    num_queries = tl.load(cu_query_lens_ptr + sequence + 1) - first_token
    begin_query = (tile - first_token // TOKENS - sequence) * TOKENS
    if (num_queries < 2) | (begin_query >= num_queries):
        return
    first_position = tl.load(context_lens_ptr + sequence) - num_queries
    end_query = tl.minimum(begin_query + TOKENS, num_queries)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    queries = begin_query + rows // GROUP
    row_mask = (rows < TOKENS * GROUP) & (queries < num_queries)
    q_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (first_token + queries).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    q_at = tokens * stride_qm + heads * stride_qh
    q = tl.load(q_ptr + q_at[:, None] + dims[None, :], mask=q_mask, other=0.0).to(COMPUTE_DTYPE)

    score_scale, value_scale = outer_scale, 1.0
    tanh_scale = inner_scale
    if HAS_SCALES:
        k_scale = tl.load(scales_ptr + kv_head)
        value_scale = tl.load(scales_ptr + stride_scale + kv_head)
        if HAS_SOFTCAP:
            tanh_scale = inner_scale * k_scale
        else:
            score_scale = outer_scale * k_scale
    table_ptr = block_table_ptr + sequence.to(tl.int64) * stride_table
    k_ptr = kv_ptr + kv_head.to(tl.int64) * stride_head
    positions = first_position + queries
    attended = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)

    end = first_position + end_query
    if HAS_WINDOW:
        masked_from = tl.maximum(first_position + begin_query - window + 1, 0) // BLOCK_N * BLOCK_N
    else:
        masked_from = tl.maximum(first_position + begin_query + 1, 0) // BLOCK_N * BLOCK_N
        attended, maximum, total = attend_tiles(
            attended, maximum, total, q, positions, 0, masked_from, table_ptr, k_ptr, stride_block, stride_part,
            window, tanh_scale, score_scale, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, COMPUTE_DTYPE, PRECISION,
            HAS_SOFTCAP, False,
        )  # fmt: skip
    attended, maximum, total = attend_tiles(
        attended, maximum, total, q, positions, masked_from, end, table_ptr, k_ptr, stride_block, stride_part,
        window, tanh_scale, score_scale, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, COMPUTE_DTYPE, PRECISION,
        HAS_SOFTCAP, True,
    )  # fmt: skip
    attended = attended * (value_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    out_at = (tokens * (NUM_KV_HEADS * GROUP) + heads) * HEAD_DIM
    tl.store(out_ptr + out_at[:, None] + dims[None, :], attended.to(out_ptr.dtype.element_ty), mask=q_mask)
