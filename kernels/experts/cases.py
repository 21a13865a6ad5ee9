"""Experts as engines launch them: what differs in what is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kvern.kernels.experts.grouped import experts
from kvern.kernels.launch_case import LaunchCase


def cases() -> Iterator[LaunchCase]:
    """Features as in Mixtral 8x7B and Qwen 3 30B, whose weights of all experts need not be there to compile."""
    yield _case("8 experts", torch.bfloat16, num_experts=8, top_k=2)
    yield _case("128 experts", torch.bfloat16, num_experts=128, top_k=8)
    yield _case("small model", torch.float32, num_experts=4, top_k=2)


def _case(name: str, dtype: torch.dtype, *, num_experts: int, top_k: int) -> LaunchCase:
    return LaunchCase(name, dtype, partial(_launch, dtype=dtype, num_experts=num_experts, top_k=top_k))


def _launch(device: torch.device, *, dtype: torch.dtype, num_experts: int, top_k: int) -> None:
    hidden_size, size = 512, 256
    experts(
        torch.zeros(16, hidden_size, dtype=dtype, device=device),
        torch.zeros(num_experts, 2 * size, hidden_size, dtype=dtype, device=device),
        torch.zeros(num_experts, hidden_size, size, dtype=dtype, device=device),
        torch.zeros(16, top_k, dtype=torch.int64, device=device),
        torch.zeros(16, top_k, device=device),
    )
