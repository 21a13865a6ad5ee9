"""A launch that the engine makes: what to compile ahead, and what tests inspect the machine code of."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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


def find_cases() -> dict[str, LaunchCase]:
    """Return the cases of all operations, by "operation: name, type"."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*/cases.py")):
        operation = path.parent.name
        for case in importlib.import_module(f"kvern.kernels.{operation}.cases").cases():
            found[f"{operation}: {case.name}, {str(case.dtype).removeprefix('torch.')}"] = case
    return found
