"""Token masks against their definition, on odd vocabularies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from kvern.kernels.check import Check, assert_same, name_of
from kvern.kernels.token_mask import apply_token_mask, reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def checks() -> Iterator[Check]:
    for vocab_size, dtype in product((1, 31, 32, 123, 5003), _DTYPES):
        yield Check(f"{vocab_size} tokens, {name_of(dtype)}", partial(_check, vocab_size, dtype))


def make_inputs(vocab_size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of 5 rows, and masks for 3 of them."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator).to(dtype)
    bits = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), generator=generator, dtype=torch.int64)
    return logits, torch.tensor([4, 0, 2]), bits.to(torch.int32)


def _check(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    logits, rows, bits = make_inputs(vocab_size, dtype)
    actual = logits.to(device, copy=True)
    apply_token_mask(actual, rows.to(device), bits.to(device))
    reference.apply_token_mask(logits, rows, bits)
    assert_same(actual, logits)
