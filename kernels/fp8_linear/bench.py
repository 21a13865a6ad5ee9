"""Rounding of Llama 3 8B's hidden states to fp8, in bytes a second: `python -m kvern.kernels.fp8_linear.bench`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import torch

from kvern.kernels.ceilings.rates import Work, print_rates
from kvern.kernels.fp8_linear import kernel

_SIZE = 4096


def works(device: torch.device) -> Iterator[Work]:
    """A decode step of 64 sequences, and a chunk of 8,192 tokens."""
    for num_tokens in (64, 8192):
        x = torch.randn(num_tokens, _SIZE, dtype=torch.bfloat16, device=device)
        yield Work(f"rows of {num_tokens:,}", partial(kernel.quantize_rows, x), 3 * x.numel())


if __name__ == "__main__":
    sys.exit(print_rates(works))
