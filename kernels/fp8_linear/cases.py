"""Rounding of rows as engines launch it: what differs in what is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kvern.kernels.fp8_linear import FP8, kernel
from kvern.kernels.launch_case import LaunchCase


def cases() -> Iterator[LaunchCase]:
    """Inputs of the projections of models from 8B to 70B."""
    for size in (4096, 14336, 28672):
        yield LaunchCase(f"rows of {size}", FP8, partial(_launch, size=size), min_architecture=90)


def _launch(device: torch.device, *, size: int) -> None:
    kernel.quantize_rows(torch.zeros(16, size, dtype=torch.bfloat16, device=device))
