"""A launch that the engine makes: what to compile ahead, and what tests inspect the machine code of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LaunchCase:
    """One specialization of an operation's kernels. Each operation lists its own in `<operation>/cases.py`."""

    name: str
    """As "decode, 8 heads a group"."""
    dtype: torch.dtype
    launch: Callable[[torch.device], object]
    """Calls the operation's launcher on tensors of a device, of the sizes and strides of a real model."""
    min_architecture: int = 80
    """Of the GPUs that have what it takes."""
