"""A layer of experts of Mixtral 8x7B: bytes a second for few tokens, operations for many.

Run it as `python -m kvern.kernels.experts.bench`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import torch

from kvern.kernels.ceilings.rates import Work, print_rates
from kvern.kernels.experts.grouped import experts

_NUM_EXPERTS, _TOP_K, _HIDDEN_SIZE, _SIZE = 8, 2, 4096, 14_336


def works(device: torch.device) -> Iterator[Work]:
    """Decode steps, which read the weights of all experts, and chunks."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    gate_up, down = random(_NUM_EXPERTS, 2 * _SIZE, _HIDDEN_SIZE), random(_NUM_EXPERTS, _HIDDEN_SIZE, _SIZE)
    for num_tokens in (16, 64, 2048, 8192):
        weights, ids = torch.rand(num_tokens, _NUM_EXPERTS, device=device).topk(_TOP_K)
        launch = partial(experts, random(num_tokens, _HIDDEN_SIZE), gate_up, down, ids, weights)
        if num_tokens > 64:
            operations = 2 * num_tokens * _TOP_K * 3 * _HIDDEN_SIZE * _SIZE
            yield Work(f"{num_tokens:,} tokens", launch, operations=operations)
        else:
            yield Work(f"{num_tokens:,} tokens", launch, 2 * (gate_up.numel() + down.numel()))


if __name__ == "__main__":
    sys.exit(print_rates(works))
