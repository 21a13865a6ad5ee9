"""The edges of top_k and top_p by exact bisection, as device functions in Triton.

A set is told by its edge, a key of `ordered_keys`, and by how many of the tokens that have this key are in it: those
with the lowest ids. All greater ones are in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvern.kernels.sampling.weigh import LOWEST_KEY, ordered_keys, token_weights, value_of_key

_INF = tl.constexpr(float("inf"))


@triton.jit
def worth_of(x, in_range, best, temperature, log_min_p, BY_WEIGHT: tl.constexpr):
    """Return what candidates count for: their weight, or 1."""
    if BY_WEIGHT:
        return tl.where(in_range, token_weights(x, best, temperature, log_min_p), 0)
    return in_range.to(tl.int64)


@triton.jit
def worth_reaching(
    keys,
    worths,
    candidates_ptr,
    num_candidates,
    best,
    temperature,
    log_min_p,
    key,
    BY_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return what the candidates that have at least a key are worth. keys, worths: those of the first BLOCK."""
    sums = tl.where(keys >= key, worths, 0)
    for begin in range(BLOCK, num_candidates, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        in_range = places < num_candidates
        x = tl.load(candidates_ptr + places, mask=in_range, other=-_INF)
        worth = worth_of(x, in_range, best, temperature, log_min_p, BY_WEIGHT)
        sums += tl.where(ordered_keys(x).to(tl.int64) >= key, worth, 0)
    return tl.sum(sums)


@triton.jit
def find_edge(
    candidates_ptr,
    num_candidates,
    best,
    temperature,
    log_min_p,
    low,
    needed,
    BY_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the greatest key that candidates worth at least `needed` reach, and what those above it are worth.

    low: a key that candidates worth at least `needed` reach. The first BLOCK candidates, mostly all, stay in registers.
    """
    places = tl.arange(0, BLOCK)
    in_range = places < num_candidates
    x = tl.load(candidates_ptr + places, mask=in_range, other=-_INF)
    keys = ordered_keys(x).to(tl.int64)
    worths = worth_of(x, in_range, best, temperature, log_min_p, BY_WEIGHT)
    high = ordered_keys(best).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        worth = worth_reaching(
            keys, worths, candidates_ptr, num_candidates, best, temperature, log_min_p, middle, BY_WEIGHT, BLOCK
        )
        low, high = tl.where(worth >= needed, middle, low), tl.where(worth >= needed, high, middle - 1)
    above = worth_reaching(
        keys, worths, candidates_ptr, num_candidates, best, temperature, log_min_p, low + 1, BY_WEIGHT, BLOCK
    )
    return low, above


@triton.jit
def find_edges(
    candidates_ptr,
    num_candidates,
    total,
    best,
    temperature,
    log_min_p,
    top_k,
    top_p,
    bound,
    BLOCK: tl.constexpr,
):
    """Return edge and number of ties, int64 each, of what top_k and then top_p leave.

    total: the weight of all tokens; top_k: 0 where it leaves none out; bound: a key that top_k candidates reach.
    """
    edge, num_ties = tl.full((), LOWEST_KEY, tl.int64), tl.zeros((), tl.int64)
    if top_k > 0:
        edge, above = find_edge(
            candidates_ptr, num_candidates, best, temperature, log_min_p, bound, top_k, False, BLOCK
        )
        num_ties = top_k - above
        if top_p < 1.0:
            total = weigh_kept(candidates_ptr, num_candidates, best, temperature, log_min_p, edge, num_ties, BLOCK)
    if top_p < 1.0:
        needed = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
        needed = tl.minimum(tl.maximum(needed, 1), total)
        edge, above = find_edge(candidates_ptr, num_candidates, best, temperature, log_min_p, edge, needed, True, BLOCK)
        edge_weight = tl.maximum(token_weights(value_of_key(edge.to(tl.int32)), best, temperature, log_min_p), 1)
        num_ties = (needed - above + edge_weight - 1) // edge_weight
    return edge, num_ties


@triton.jit
def weigh_kept(candidates_ptr, num_candidates, best, temperature, log_min_p, edge, num_ties, BLOCK: tl.constexpr):
    """Return the weight of the candidates above an edge, and of some at it."""
    sums = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, num_candidates, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        in_range = places < num_candidates
        x = tl.load(candidates_ptr + places, mask=in_range, other=-_INF)
        is_above = in_range & (ordered_keys(x).to(tl.int64) > edge)
        sums += tl.where(is_above, token_weights(x, best, temperature, log_min_p), 0)
    edge_weight = token_weights(value_of_key(edge.to(tl.int32)), best, temperature, log_min_p)
    return tl.sum(sums) + num_ties * edge_weight
