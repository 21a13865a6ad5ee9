"""The gated activation of Llama 3 8B, in bytes a second: `python -m kvern.kernels.gated_activation.bench`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import torch

from kvern.kernels.ceilings.rates import Work, print_rates
from kvern.kernels.gated_activation import GatedActivation, gated_activation

_SIZE = 14_336


def works(device: torch.device) -> Iterator[Work]:
    """A decode step of 64 sequences, and a chunk of 8,192 tokens."""
    for num_tokens in (64, 8192):
        x = torch.randn(num_tokens, 2 * _SIZE, dtype=torch.bfloat16, device=device)
        yield Work(f"silu of {num_tokens:,}", partial(gated_activation, x, GatedActivation.SILU), 3 * x.numel())


if __name__ == "__main__":
    sys.exit(print_rates(works))
