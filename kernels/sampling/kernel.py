"""A draw from filtered logits in Triton, in six launches.

1. peaks: the greatest logit of each tile, and of each stretch of 64 tokens.
2. bounds: the row's greatest logit. Of top_k: the k-th greatest of the stretches' greatest, which at least k reach.
3. candidates: what may be at the edge of top_k or top_p is collected, in any order: mostly a few hundred tokens.
4. edges: a bisection over the keys of the candidates for the edge of top_k, then one for that of top_p.
5. tiles: how much of each tile is left, in weight.
6. draws: the tile, and in it the token, at which the sum in order of ids exceeds the random number's share.

Rows that are greedy or fill up the batch are done after the second. Sums are of whole numbers, atomic ones too, so
their order does not matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvern.kernels.philox.kernel import uniform53
from kvern.kernels.sampling.edges import find_edges
from kvern.kernels.sampling.weigh import LOWEST_KEY, draws, has_top_k, ordered_keys, token_weights, value_of_key
from kvern.kernels.sampling.weights import WEIGHT_BITS

if TYPE_CHECKING:
    from kvern.kernels.sampling import DrawParams

_TILE = 4096
_STRETCHES = 64
"""Of a tile."""
_CANDIDATES = 4096
"""Looked at together."""

_INF = tl.constexpr(float("inf"))
_HALF_OF_GREATEST = tl.constexpr(2.0 ** (WEIGHT_BITS - 1))
_PURPOSE_TOKEN = tl.constexpr(0)
"""Third counter word of a draw: what it is for."""


@triton.jit
def peaks_kernel(
    logits_ptr,
    slots_ptr,
    stretch_peaks_ptr,
    tile_peaks_ptr,
    tile_tokens_ptr,
    vocab_size,
    stride_row,
    STRETCHES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The greatest logit of one row's tile, the lowest id that has it, and the greatest of each stretch."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row * tl.num_programs(1) + tile
    if tl.load(slots_ptr + row) >= 0:
        tokens = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits_ptr + row * stride_row + tokens, mask=tokens < vocab_size, other=-_INF)
        peak = tl.max(x)
        stretches = tl.max(tl.reshape(x, (STRETCHES, TILE // STRETCHES)), axis=1)
        tl.store(stretch_peaks_ptr + at * STRETCHES + tl.arange(0, STRETCHES), stretches)
        tl.store(tile_peaks_ptr + at, peak)
        tl.store(tile_tokens_ptr + at, tl.min(tl.where(x == peak, tokens, vocab_size - 1)))


@triton.jit
def bounds_kernel(
    slots_ptr,
    stretch_peaks_ptr,
    tile_peaks_ptr,
    tile_tokens_ptr,
    temperature_ptr,
    top_k_ptr,
    token_ids_ptr,
    is_allowed_ptr,
    best_ptr,
    bound_ptr,
    num_candidates_ptr,
    totals_ptr,
    vocab_size,
    num_tiles,
    STRETCHES: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    """For one row: its greatest logit and the lowest id that has it, and a key that at least top_k logits reach."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        tl.store(token_ids_ptr + row, 0)
        tl.store(is_allowed_ptr + row, True)
    else:
        tiles = tl.arange(0, NUM_TILES)
        in_row = tiles < num_tiles
        peaks = tl.load(tile_peaks_ptr + row * num_tiles + tiles, mask=in_row, other=-_INF)
        tokens = tl.load(tile_tokens_ptr + row * num_tiles + tiles, mask=in_row, other=vocab_size - 1)
        best = tl.max(peaks)
        tl.store(best_ptr + row, best)
        tl.store(token_ids_ptr + row, tl.min(tl.where(peaks == best, tokens, vocab_size - 1)).to(tl.int64))
        tl.store(is_allowed_ptr + row, best > -_INF)
        tl.store(num_candidates_ptr + row, 0)
        tl.store(totals_ptr + row, tl.zeros((), tl.int64))
        top_k = tl.load(top_k_ptr + slot)
        if draws(slot, temperature_ptr) & has_top_k(top_k, vocab_size):
            places = tl.arange(0, NUM_TILES * STRETCHES)
            is_stretch = places < num_tiles * STRETCHES
            stretches = tl.load(stretch_peaks_ptr + row * num_tiles * STRETCHES + places, mask=is_stretch, other=-_INF)
            keys = ordered_keys(stretches).to(tl.int64)
            low, high = tl.full((), LOWEST_KEY, tl.int64), tl.max(keys)
            while low < high:
                middle = low + (high - low + 1) // 2
                reaches = tl.sum((keys >= middle).to(tl.int32)) >= top_k
                low, high = tl.where(reaches, middle, low), tl.where(reaches, high, middle - 1)
            tl.store(bound_ptr + row, low.to(tl.int32))


@triton.jit
def candidates_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    log_min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    best_ptr,
    bound_ptr,
    candidates_ptr,
    num_candidates_ptr,
    totals_ptr,
    vocab_size,
    stride_row,
    TILE: tl.constexpr,
):
    """Collect logits of one row's tile that reach the bound, and add up the tile's weight.

    Without top_k, the bound is a weight. All tokens below (1 - top_p) / vocab_size of the greatest weight together
    weigh less than 1 - top_p of the whole, so the edge of top_p is above; half of it leaves room for rounding.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if draws(slot, temperature_ptr):
        top_k, top_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot)
        by_rank = has_top_k(top_k, vocab_size)
        if by_rank | (top_p < 1.0):
            tokens = tile * TILE + tl.arange(0, TILE)
            in_vocab = tokens < vocab_size
            x = tl.load(logits_ptr + row * stride_row + tokens, mask=in_vocab, other=-_INF)
            weights = token_weights(
                x, tl.load(best_ptr + row), tl.load(temperature_ptr + slot), tl.load(log_min_p_ptr + slot)
            )
            least = tl.maximum(((1.0 - top_p) * _HALF_OF_GREATEST / vocab_size).to(tl.int64), 1)
            bound = tl.load(bound_ptr + row, mask=by_rank, other=0)
            is_candidate = in_vocab & tl.where(by_rank, ordered_keys(x) >= bound, weights >= least)
            ranks = tl.cumsum(is_candidate.to(tl.int32))
            begin = tl.atomic_add(num_candidates_ptr + row, tl.sum(is_candidate.to(tl.int32)))
            tl.store(candidates_ptr + row * vocab_size + begin + ranks - 1, x, mask=is_candidate)
            tl.atomic_add(totals_ptr + row, tl.sum(weights))


@triton.jit
def edges_kernel(
    slots_ptr,
    temperature_ptr,
    log_min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    best_ptr,
    bound_ptr,
    candidates_ptr,
    num_candidates_ptr,
    totals_ptr,
    edges_ptr,
    num_ties_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """For one row: the key above which tokens are kept, and of how many that have it the lowest ids are."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if draws(slot, temperature_ptr):
        top_k, top_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot)
        by_rank = has_top_k(top_k, vocab_size)
        bound = tl.load(bound_ptr + row, mask=by_rank, other=LOWEST_KEY)
        edge, num_ties = find_edges(
            candidates_ptr + row * vocab_size,
            tl.load(num_candidates_ptr + row),
            tl.load(totals_ptr + row),
            tl.load(best_ptr + row),
            tl.load(temperature_ptr + slot),
            tl.load(log_min_p_ptr + slot),
            tl.where(by_rank, top_k, 0),
            top_p,
            bound.to(tl.int64),
            BLOCK,
        )
        tl.store(edges_ptr + row, edge.to(tl.int32))
        tl.store(num_ties_ptr + row, num_ties)


@triton.jit
def tiles_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    log_min_p_ptr,
    best_ptr,
    edges_ptr,
    above_ptr,
    ties_ptr,
    vocab_size,
    stride_row,
    TILE: tl.constexpr,
):
    """For one row's tile: the weight above the edge, and how many tokens are at it."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if draws(slot, temperature_ptr):
        tokens = tile * TILE + tl.arange(0, TILE)
        in_vocab = tokens < vocab_size
        x = tl.load(logits_ptr + row * stride_row + tokens, mask=in_vocab, other=-_INF)
        weights = token_weights(
            x, tl.load(best_ptr + row), tl.load(temperature_ptr + slot), tl.load(log_min_p_ptr + slot)
        )
        keys, edge = ordered_keys(x), tl.load(edges_ptr + row)
        at = row * tl.num_programs(1) + tile
        tl.store(above_ptr + at, tl.sum(tl.where(keys > edge, weights, 0)))
        tl.store(ties_ptr + at, tl.sum((in_vocab & (keys == edge)).to(tl.int32)))


@triton.jit
def draws_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    temperature_ptr,
    log_min_p_ptr,
    seed_ptr,
    best_ptr,
    edges_ptr,
    num_ties_ptr,
    above_ptr,
    ties_ptr,
    token_ids_ptr,
    vocab_size,
    num_tiles,
    stride_row,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    """For one row: the first token, by id, whose cumulative weight exceeds the number's share of the whole."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if draws(slot, temperature_ptr):
        best, edge, num_ties = tl.load(best_ptr + row), tl.load(edges_ptr + row), tl.load(num_ties_ptr + row)
        temperature, log_min_p = tl.load(temperature_ptr + slot), tl.load(log_min_p_ptr + slot)
        tiles = tl.arange(0, NUM_TILES)
        at, in_row = row * num_tiles + tiles, tiles < num_tiles
        above, ties = tl.load(above_ptr + at, mask=in_row, other=0), tl.load(ties_ptr + at, mask=in_row, other=0)
        edge_weight = token_weights(value_of_key(edge), best, temperature, log_min_p)
        ties_before = (tl.cumsum(ties) - ties).to(tl.int64)
        kept_ties = tl.minimum(tl.maximum(num_ties - ties_before, 0), ties.to(tl.int64))
        tile_weights = above + tl.where(kept_ties > 0, kept_ties * edge_weight, 0)
        total = tl.sum(tile_weights)
        uniform = uniform53(tl.load(seed_ptr + slot), tl.load(positions_ptr + row), _PURPOSE_TOKEN)
        target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        tile = tl.minimum(tl.sum((tl.cumsum(tile_weights) <= target).to(tl.int32)), num_tiles - 1)
        target -= tl.sum(tl.where(tiles < tile, tile_weights, 0))
        num_ties -= tl.sum(tl.where(tiles < tile, kept_ties, 0))

        tokens = tile * TILE + tl.arange(0, TILE)
        in_vocab = tokens < vocab_size
        x = tl.load(logits_ptr + row * stride_row + tokens, mask=in_vocab, other=-_INF)
        keys = ordered_keys(x)
        is_tie = in_vocab & (keys == edge)
        rank = tl.cumsum(is_tie.to(tl.int32))
        is_kept = (keys > edge) | (is_tie & (rank <= num_ties))
        weights = tl.where(is_kept, token_weights(x, best, temperature, log_min_p), 0)
        token = tile * TILE + tl.sum((tl.cumsum(weights) <= target).to(tl.int32))
        tl.store(token_ids_ptr + row, tl.minimum(token, vocab_size - 1).to(tl.int64))


class _Workspace:
    """What the launches hand on, for each row."""

    def __init__(self, logits: Tensor) -> None:
        num_rows, vocab_size = logits.shape
        num_tiles = triton.cdiv(vocab_size, _TILE)

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((num_rows, *shape), dtype=dtype, device=logits.device)

        self.token_ids, self.is_allowed = empty(dtype=torch.int64), empty(dtype=torch.bool)
        self.stretch_peaks = empty(num_tiles * _STRETCHES, dtype=torch.float32)
        self.tile_peaks, self.tile_tokens = empty(num_tiles, dtype=torch.float32), empty(num_tiles, dtype=torch.int32)
        self.best, self.bounds = empty(dtype=torch.float32), empty(dtype=torch.int32)
        self.candidates, self.num_candidates = empty(vocab_size, dtype=torch.float32), empty(dtype=torch.int32)
        self.totals = empty(dtype=torch.int64)
        self.edges, self.num_ties = empty(dtype=torch.int32), empty(dtype=torch.int64)
        self.above, self.ties = empty(num_tiles, dtype=torch.int64), empty(num_tiles, dtype=torch.int32)


def launch(logits: Tensor, slots: Tensor, output_positions: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
    """Return tokens, and which rows have any. Shapes as in the launcher."""
    w = _Workspace(logits)
    num_rows, vocab_size = logits.shape
    num_tiles, stride = triton.cdiv(vocab_size, _TILE), logits.stride(0)
    per_tile, per_row, block_tiles = (num_rows, num_tiles), (num_rows,), triton.next_power_of_2(num_tiles)
    if not num_rows:
        return w.token_ids, w.is_allowed
    weigh = (params.temperature, params.log_min_p)
    cut = (*weigh, params.top_k, params.top_p)
    found = (w.best, w.bounds, w.candidates, w.num_candidates, w.totals)
    # Products and sums are rounded one by one, as on a CPU: see `weights`.
    options: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
    wide = options | {"num_warps": 16}

    peaks_kernel[per_tile](
        logits, slots, w.stretch_peaks, w.tile_peaks, w.tile_tokens, vocab_size, stride,
        STRETCHES=_STRETCHES, TILE=_TILE, **options,
    )  # fmt: skip
    bounds_kernel[per_row](
        slots, w.stretch_peaks, w.tile_peaks, w.tile_tokens, params.temperature, params.top_k,
        w.token_ids, w.is_allowed, w.best, w.bounds, w.num_candidates, w.totals, vocab_size, num_tiles,
        STRETCHES=_STRETCHES, NUM_TILES=block_tiles, **options,
    )  # fmt: skip
    candidates_kernel[per_tile](logits, slots, *cut, *found, vocab_size, stride, TILE=_TILE, **wide)
    edges_kernel[per_row](slots, *cut, *found, w.edges, w.num_ties, vocab_size, BLOCK=_CANDIDATES, **wide)
    tiles_kernel[per_tile](
        logits, slots, *weigh, w.best, w.edges, w.above, w.ties, vocab_size, stride, TILE=_TILE, **options
    )
    draws_kernel[per_row](
        logits, slots, output_positions, *weigh, params.seed, w.best, w.edges, w.num_ties, w.above, w.ties,
        w.token_ids, vocab_size, num_tiles, stride, TILE=_TILE, NUM_TILES=block_tiles, **options,
    )  # fmt: skip
    return w.token_ids, w.is_allowed
