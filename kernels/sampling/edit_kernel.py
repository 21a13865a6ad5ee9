"""Biases, masks and penalties on logits, and the look whether they are numbers, in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvern.kernels.token_mask.kernel import load_is_allowed

if TYPE_CHECKING:
    from kvern.kernels.sampling import LogitBias, Penalties, TokenMask

_TILE = 4096

_LARGEST = tl.constexpr(1e30)
"""Bound on what repetition_penalty makes of a logit: division by the least temperature must not overflow."""

_INF = tl.constexpr(float("inf"))


@triton.jit
def penalize(x, params_ptr, in_prompt_ptr, output_counts_ptr, tokens, in_vocab):
    """Return penalized logits. What is out stays out."""
    repetition, frequency, presence = tl.load(params_ptr), tl.load(params_ptr + 1), tl.load(params_ptr + 2)
    counts = tl.load(output_counts_ptr + tokens, mask=in_vocab, other=0)
    in_prompt = tl.load(in_prompt_ptr + tokens, mask=in_vocab, other=0) != 0
    repeated = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
    repeated = tl.minimum(tl.maximum(repeated, -_LARGEST), _LARGEST)
    is_output = counts > 0
    x = tl.where((is_output | in_prompt) & (x > -_INF), repeated, x)
    return x - counts.to(tl.float32) * frequency - is_output.to(tl.float32) * presence


@triton.jit
def edit_kernel(
    logits_ptr,
    out_ptr,
    peaks_ptr,
    slots_ptr,
    mask_index_ptr,
    mask_bits_ptr,
    bias_index_ptr,
    bias_ptr,
    penalty_index_ptr,
    penalty_params_ptr,
    in_prompt_ptr,
    output_counts_ptr,
    vocab_size,
    stride_row,
    stride_out,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """out = penalized(masked(logits + bias)), and peaks = the greatest logit before that, for one row and TILE tokens.

    A peak is +inf where any logit is NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    peak = 0.0
    if tl.load(slots_ptr + row) >= 0:
        tokens = tile * TILE + tl.arange(0, TILE)
        in_vocab = tokens < vocab_size
        x = tl.load(logits_ptr + row * stride_row + tokens, mask=in_vocab, other=-_INF).to(tl.float32)
        peak = tl.max(tl.where(x != x, _INF, x))
        if HAS_BIAS:
            index = tl.load(bias_index_ptr + row)
            if index >= 0:
                x += tl.load(bias_ptr + index * vocab_size + tokens, mask=in_vocab, other=0.0)
        if HAS_MASK:
            index = tl.load(mask_index_ptr + row)
            if index >= 0:
                bits_ptr = mask_bits_ptr + index * tl.cdiv(vocab_size, 32)
                x = tl.where(load_is_allowed(bits_ptr, tokens, in_vocab), x, -_INF)
        if HAS_PENALTIES:
            index = tl.load(penalty_index_ptr + row)
            if index >= 0:
                at = index * vocab_size
                x = penalize(
                    x, penalty_params_ptr + index * 3, in_prompt_ptr + at, output_counts_ptr + at, tokens, in_vocab
                )
        tl.store(out_ptr + row * stride_out + tokens, x, mask=in_vocab)
    tl.store(peaks_ptr + row * tl.num_programs(1) + tile, peak)


@triton.jit
def count_kernel(index_ptr, token_ids_ptr, output_counts_ptr, vocab_size):
    """output_counts[index, token] += 1 for one row."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(index_ptr + row)
    if index >= 0:
        count_ptr = output_counts_ptr + index * vocab_size + tl.load(token_ids_ptr + row)
        tl.store(count_ptr, tl.load(count_ptr) + 1)


def launch(
    logits: Tensor,
    out: Tensor,
    slots: Tensor,
    mask: TokenMask | None,
    bias: LogitBias | None,
    penalties: Penalties | None,
) -> Tensor:
    """Edit logits into out, which may be the same memory. Returns which rows are finite: [num_rows] bool."""
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, _TILE)
    peaks = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=logits.device)
    if num_rows:
        edit_kernel[(num_rows, num_tiles)](
            logits,
            out,
            peaks,
            slots,
            *((None, None) if mask is None else (mask.index, mask.bits)),
            *((None, None) if bias is None else (bias.index, bias.addends)),
            *((None,) * 4 if penalties is None else _pointers(penalties)),
            vocab_size,
            logits.stride(0),
            out.stride(0),
            HAS_MASK=mask is not None,
            HAS_BIAS=bias is not None,
            HAS_PENALTIES=penalties is not None,
            TILE=_TILE,
            num_warps=8,
            # Products and sums are rounded one by one, as on a CPU.
            enable_fp_fusion=False,
        )
    return peaks.amax(dim=1).isfinite()


def launch_count(penalties: Penalties, token_ids: Tensor) -> None:
    """Shapes as in the launcher."""
    if len(token_ids):
        counts = penalties.output_counts
        count_kernel[(len(token_ids),)](penalties.index, token_ids, counts, counts.shape[1], num_warps=1)


def _pointers(penalties: Penalties) -> tuple[Tensor, ...]:
    return penalties.index, penalties.params, penalties.in_prompt, penalties.output_counts
