"""RMSNorm on the hidden states of Llama 3 8B, in bytes a second: `python -m kvern.kernels.rms_norm.bench`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import torch

from kvern.kernels.ceilings.rates import Work, print_rates
from kvern.kernels.rms_norm import add_rms_norm, rms_norm

_SIZE = 4096


def works(device: torch.device) -> Iterator[Work]:
    """A decode step of 64 sequences, and a chunk of 8,192 tokens."""
    for num_tokens in (64, 8192):
        x, residual = torch.randn(2, num_tokens, _SIZE, dtype=torch.bfloat16, device=device)
        weight, tensor_bytes = torch.ones(_SIZE, dtype=torch.bfloat16, device=device), 2 * x.numel()
        yield Work(f"norm of {num_tokens:,}", partial(rms_norm, x, weight, 1e-5), 2 * tensor_bytes)
        yield Work(
            f"add and norm of {num_tokens:,}", partial(add_rms_norm, x, residual, weight, 1e-5), 4 * tensor_bytes
        )


if __name__ == "__main__":
    sys.exit(print_rates(works))
