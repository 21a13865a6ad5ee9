"""Sampling as engines launch it: what differs in what is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kvern.kernels.launch_case import LaunchCase
from kvern.kernels.sampling import DrawParams, LogitBias, Penalties, TokenMask, count_tokens, draw, edit_logits

_NUM_ROWS = 16


def cases() -> Iterator[LaunchCase]:
    """Vocabularies of Llama 3 and, odd, of GPT-2."""
    for vocab_size in (128_256, 50_257):
        yield LaunchCase(f"draw, {vocab_size} tokens", torch.float32, partial(_draw, vocab_size=vocab_size))
    yield LaunchCase("edit", torch.bfloat16, partial(_edit, dtype=torch.bfloat16, vocab_size=128_256))
    yield LaunchCase("edit, odd", torch.float32, partial(_edit, dtype=torch.float32, vocab_size=50_257))


def _draw(device: torch.device, *, vocab_size: int) -> None:
    index = _index(device)
    params = DrawParams(
        temperature=torch.ones(_NUM_ROWS, device=device),
        log_min_p=torch.full((_NUM_ROWS,), float("-inf"), device=device),
        top_k=index,
        top_p=torch.ones(_NUM_ROWS, dtype=torch.float64, device=device),
        seed=index,
    )
    draw(torch.zeros(_NUM_ROWS, vocab_size, device=device), index, index, params)


def _edit(device: torch.device, *, dtype: torch.dtype, vocab_size: int) -> None:
    index = _index(device)

    def zeros(width: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(_NUM_ROWS, width, dtype=dtype, device=device)

    penalties = Penalties(index, zeros(3, torch.float32), zeros(vocab_size, torch.bool), zeros(vocab_size, torch.int32))
    mask = TokenMask(index, zeros(-(-vocab_size // 32), torch.int32))
    bias = LogitBias(index, zeros(vocab_size, torch.float32))
    edit_logits(zeros(vocab_size, dtype), index, mask, bias, penalties)
    edit_logits(zeros(vocab_size, dtype), index)
    count_tokens(penalties, index)


def _index(device: torch.device) -> Tensor:
    return torch.zeros(_NUM_ROWS, dtype=torch.int64, device=device)
