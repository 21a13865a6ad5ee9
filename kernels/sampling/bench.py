"""Sampling from a vocabulary of 128,256, in bytes of logits a second: `python -m kvern.kernels.sampling.bench`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import torch

from kvern.kernels.ceilings.rates import Work, print_rates
from kvern.kernels.sampling import DrawParams, draw, edit_logits

_VOCAB_SIZE = 128_256
_KINDS: dict[str, tuple[float, int, float]] = {
    "greedy": (0.0, 0, 1.0),
    "temperature": (0.8, 0, 1.0),
    "top_k 50": (0.8, 50, 1.0),
    "top_p 0.95": (0.8, 0, 0.95),
    "top_k 50, top_p 0.95": (0.8, 50, 0.95),
    "top_p 0.95, all tokens alike": (100.0, 0, 0.95),
}
"""Temperature, top_k and top_p."""


def works(device: torch.device) -> Iterator[Work]:
    """64 rows, all of one kind."""
    logits, slots = 3 * torch.randn(64, _VOCAB_SIZE, device=device), torch.arange(64, device=device)
    num_bytes = 4 * logits.numel()
    yield Work("look for NaN", partial(edit_logits, logits, slots), 2 * num_bytes)
    for name, kind in _KINDS.items():
        yield Work(name, partial(draw, logits, slots, slots, _params(slots, *kind)), num_bytes)


def _params(slots: torch.Tensor, temperature: float, top_k: int, top_p: float) -> DrawParams:
    return DrawParams(
        temperature=torch.full_like(slots, temperature, dtype=torch.float32),
        log_min_p=torch.full_like(slots, float("-inf"), dtype=torch.float32),
        top_k=torch.full_like(slots, top_k),
        top_p=torch.full_like(slots, top_p, dtype=torch.float64),
        seed=slots,
    )


if __name__ == "__main__":
    sys.exit(print_rates(works))
