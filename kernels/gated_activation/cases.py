"""Gated activations as engines launch them: what differs in what is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kvern.kernels.gated_activation import GatedActivation, gated_activation
from kvern.kernels.launch_case import LaunchCase


def cases() -> Iterator[LaunchCase]:
    """Llama 3 8B and its like."""
    for activation in GatedActivation:
        for dtype in (torch.bfloat16, torch.float32):
            yield LaunchCase(activation.value, dtype, partial(_launch, dtype=dtype, activation=activation))


def _launch(device: torch.device, *, dtype: torch.dtype, activation: GatedActivation) -> None:
    gated_activation(torch.zeros(16, 28_672, dtype=dtype, device=device), activation)
