"""Token masks on a vocabulary of 128,256, in bytes a second: `python -m kvern.kernels.token_mask.bench`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import torch

from kvern.kernels.ceilings.rates import Work, print_rates
from kvern.kernels.token_mask import apply_token_mask

_VOCAB_SIZE = 128_256


def works(device: torch.device) -> Iterator[Work]:
    """64 rows of which nothing is allowed: everything is written."""
    logits, rows = torch.randn(64, _VOCAB_SIZE, device=device), torch.arange(64, device=device)
    bits = torch.zeros(64, _VOCAB_SIZE // 32, dtype=torch.int32, device=device)
    yield Work("64 rows", partial(apply_token_mask, logits, rows, bits), 4 * (logits.numel() + bits.numel()))


if __name__ == "__main__":
    sys.exit(print_rates(works))
