"""RMSNorm as engines launch it: what differs in what is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kvern.kernels.launch_case import LaunchCase
from kvern.kernels.rms_norm import add_rms_norm, rms_norm


def cases() -> Iterator[LaunchCase]:
    """Hidden states of models from 0.1B to 70B and beyond, and heads of queries and keys."""
    yield LaunchCase("hidden 4096", torch.bfloat16, partial(_launch, dtype=torch.bfloat16, size=4096))
    yield LaunchCase("hidden 16384", torch.bfloat16, partial(_launch, dtype=torch.bfloat16, size=16384))
    yield LaunchCase("hidden 576", torch.float32, partial(_launch, dtype=torch.float32, size=576))
    yield LaunchCase("heads of 128", torch.bfloat16, _launch_heads)


def _launch(device: torch.device, *, dtype: torch.dtype, size: int) -> None:
    x, weight = torch.zeros(16, size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device)
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, x, weight, 1e-5)
    add_rms_norm(x, x, weight, 1e-6, unit_offset=True)


def _launch_heads(device: torch.device) -> None:
    heads = torch.zeros(16, 48, 128, dtype=torch.bfloat16, device=device)
    rms_norm(heads[:, :32], torch.zeros(128, dtype=torch.bfloat16, device=device), 1e-6)
