"""Experts in Triton, in four launches: sort tokens by expert, gates and ups, downs, sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvern.kernels.experts.configurations import choose
from kvern.kernels.gated_activation.kernel import silu
from kvern.kernels.target import architecture, compute_dtype

_SORT_BLOCK = 1024
_SUM_BLOCK = 512
_GROUP = 8
"""Tiles of tokens that run beside each other."""


@triton.jit(do_not_specialize=["num_assignments"])
def sort_kernel(expert_ids_ptr, order_ptr, starts_ptr, num_assignments, BLOCK: tl.constexpr):
    """For one expert: where it starts in the order by expert, and which assignments are its own, lowest first."""
    expert = tl.program_id(0)
    start = 0
    for begin in range(0, num_assignments, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        ids = tl.load(expert_ids_ptr + places, mask=places < num_assignments, other=-1)
        start += tl.sum(((ids >= 0) & (ids < expert)).to(tl.int32))
    tl.store(starts_ptr + expert, start)
    for begin in range(0, num_assignments, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        ids = tl.load(expert_ids_ptr + places, mask=places < num_assignments, other=-1)
        is_own = ids == expert
        ranks = tl.cumsum(is_own.to(tl.int32))
        tl.store(order_ptr + start + ranks - 1, places, mask=is_own)
        start += tl.sum(is_own.to(tl.int32))
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, start)


@triton.jit
def order_work(num_blocks, GROUP: tl.constexpr):
    """Return this program's tile of tokens and block of features.

    GROUP tiles run beside each other through all blocks: they find each other's weights, and their own tokens, in L2.
    """
    program, num_tiles = tl.program_id(0), tl.num_programs(0) // num_blocks
    first = program // (GROUP * num_blocks) * GROUP
    place, width = program % (GROUP * num_blocks), tl.minimum(num_tiles - first, GROUP)
    return first + place % width, place // width


@triton.jit
def find_tile(starts_ptr, tile, num_experts, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the expert of a tile, num_experts where it has none, and the begin and end of its places in the order."""
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < num_experts
    starts = tl.load(starts_ptr + experts, mask=is_expert, other=0)
    ends = tl.load(starts_ptr + experts + 1, mask=is_expert, other=0)
    num_tiles = tl.cdiv(ends - starts, BLOCK_M)
    expert = tl.sum((tl.cumsum(num_tiles) <= tile).to(tl.int32))
    is_it = experts == expert
    start, end = tl.sum(tl.where(is_it, starts, 0)), tl.sum(tl.where(is_it, ends, 0))
    begin = start + (tile - tl.sum(tl.where(experts < expert, num_tiles, 0))) * BLOCK_M
    return expert.to(tl.int64), begin, tl.minimum(begin + BLOCK_M, end)


@triton.jit
def gate_up_kernel(
    x_ptr,
    weight_ptr,
    order_ptr,
    starts_ptr,
    out_ptr,
    num_experts,
    top_k,
    hidden_size,
    size,
    COMPUTE_DTYPE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out[assignment] = silu(gate_e @ x) * (up_e @ x) for one expert's tile of assignments and BLOCK_N features."""
    tile, block = order_work(tl.cdiv(size, BLOCK_N), GROUP)
    expert, begin, end = find_tile(starts_ptr, tile, num_experts, BLOCK_M, EXPERTS)
    if expert < num_experts:
        places = begin + tl.arange(0, BLOCK_M)
        in_tile = places < end
        assignments = tl.load(order_ptr + places, mask=in_tile, other=0).to(tl.int64)
        features = block * BLOCK_N + tl.arange(0, BLOCK_N)
        in_size = features < size
        x_rows = x_ptr + (assignments // top_k)[:, None] * hidden_size
        gate_columns = weight_ptr + (expert * 2 * size + features)[None, :] * hidden_size
        up_columns = gate_columns + size.to(tl.int64) * hidden_size
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, hidden_size, BLOCK_K):
            ks = first + tl.arange(0, BLOCK_K)
            in_k = ks < hidden_size
            x = tl.load(x_rows + ks[None, :], mask=in_tile[:, None] & in_k[None, :], other=0.0).to(COMPUTE_DTYPE)
            mask = in_k[:, None] & in_size[None, :]
            gate_weight = tl.load(gate_columns + ks[:, None], mask=mask, other=0.0).to(COMPUTE_DTYPE)
            up_weight = tl.load(up_columns + ks[:, None], mask=mask, other=0.0).to(COMPUTE_DTYPE)
            gate = tl.dot(x, gate_weight, gate, input_precision="ieee")
            up = tl.dot(x, up_weight, up, input_precision="ieee")
        out = (silu(gate) * up).to(out_ptr.dtype.element_ty)
        out_offsets = assignments[:, None] * size + features[None, :]
        tl.store(out_ptr + out_offsets, out, mask=in_tile[:, None] & in_size[None, :])


@triton.jit
def down_kernel(
    x_ptr,
    weight_ptr,
    order_ptr,
    starts_ptr,
    out_ptr,
    num_experts,
    size,
    hidden_size,
    COMPUTE_DTYPE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out[assignment] = down_e @ x[assignment] for one expert's tile of assignments and BLOCK_N features."""
    tile, block = order_work(tl.cdiv(hidden_size, BLOCK_N), GROUP)
    expert, begin, end = find_tile(starts_ptr, tile, num_experts, BLOCK_M, EXPERTS)
    if expert < num_experts:
        places = begin + tl.arange(0, BLOCK_M)
        in_tile = places < end
        assignments = tl.load(order_ptr + places, mask=in_tile, other=0).to(tl.int64)
        features = block * BLOCK_N + tl.arange(0, BLOCK_N)
        in_hidden = features < hidden_size
        x_rows = x_ptr + assignments[:, None] * size
        columns = weight_ptr + (expert * hidden_size + features)[None, :] * size
        out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, size, BLOCK_K):
            ks = first + tl.arange(0, BLOCK_K)
            in_k = ks < size
            x = tl.load(x_rows + ks[None, :], mask=in_tile[:, None] & in_k[None, :], other=0.0).to(COMPUTE_DTYPE)
            weight = tl.load(columns + ks[:, None], mask=in_k[:, None] & in_hidden[None, :], other=0.0)
            out = tl.dot(x, weight.to(COMPUTE_DTYPE), out, input_precision="ieee")
        out_offsets = assignments[:, None] * hidden_size + features[None, :]
        tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=in_tile[:, None] & in_hidden[None, :])


@triton.jit
def sum_kernel(
    values_ptr,
    expert_ids_ptr,
    expert_weights_ptr,
    out_ptr,
    top_k,
    hidden_size,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = the weighted sum of one token's values, in order of its experts, for BLOCK features."""
    token = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_hidden = features < hidden_size
    choices = tl.arange(0, TOP_K)
    in_choices = choices < top_k
    ids = tl.load(expert_ids_ptr + token * top_k + choices, mask=in_choices, other=-1)
    weights = tl.load(expert_weights_ptr + token * top_k + choices, mask=in_choices, other=0.0)
    is_before = (ids[None, :] >= 0) & (ids[None, :] < ids[:, None])
    ranks = tl.where(ids >= 0, tl.sum(is_before.to(tl.int32), axis=1), TOP_K)
    out = tl.zeros((BLOCK,), tl.float32)
    for rank in range(top_k):
        is_next = ranks == rank
        if tl.sum(is_next.to(tl.int32)) > 0:
            choice = tl.sum(tl.where(is_next, choices, 0))
            weight = tl.sum(tl.where(is_next, weights, 0.0))
            row = token * top_k + choice
            values = tl.load(values_ptr + row * hidden_size + features, mask=in_hidden, other=0.0).to(tl.float32)
            out += weight * values
    tl.store(out_ptr + token * hidden_size + features, out.to(out_ptr.dtype.element_ty), mask=in_hidden)


def launch(x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, expert_weights: Tensor, out: Tensor) -> None:
    """Shapes as in the launcher."""
    (num_experts, hidden_size, size), (num_tokens, top_k) = down.shape, expert_ids.shape
    num_assignments = num_tokens * top_k

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    order, starts = empty(num_assignments, dtype=torch.int32), empty(num_experts + 1, dtype=torch.int32)
    gated = empty(num_assignments, size, dtype=x.dtype)
    values = empty(num_assignments, hidden_size, dtype=x.dtype)

    tiling = choose(architecture(), x.dtype)
    options = {
        "COMPUTE_DTYPE": compute_dtype(x.dtype),
        "EXPERTS": triton.next_power_of_2(num_experts),
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "GROUP": _GROUP,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }
    # As many tiles as there can be: those without tokens end at once.
    num_tiles = min(num_assignments, triton.cdiv(num_assignments, tiling.block_m) + num_experts)
    sort_kernel[(num_experts,)](expert_ids, order, starts, num_assignments, BLOCK=_SORT_BLOCK, num_warps=4)
    gate_up_kernel[(triton.cdiv(size, tiling.block_n) * num_tiles,)](
        x, gate_up, order, starts, gated, num_experts, top_k, hidden_size, size, **options
    )
    down_kernel[(triton.cdiv(hidden_size, tiling.block_n) * num_tiles,)](
        gated, down, order, starts, values, num_experts, size, hidden_size, **options
    )
    sum_kernel[(num_tokens, triton.cdiv(hidden_size, _SUM_BLOCK))](
        values,
        expert_ids,
        expert_weights,
        out,
        top_k,
        hidden_size,
        TOP_K=triton.next_power_of_2(top_k),
        BLOCK=_SUM_BLOCK,
        num_warps=4,
    )
