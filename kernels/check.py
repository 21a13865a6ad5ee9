"""Comparisons of operations with their references. The interpreter's tests and `make gpu-check` run the same ones."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

_T = TypeVar("_T")
_EMPTY = torch.empty


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison. Each operation lists its own in `<operation>/checks.py`."""

    name: str
    """As "decodes, bfloat16"."""
    run: Callable[[torch.device], None]
    """Raises AssertionError where kernel and reference differ. Inputs are made on the CPU, references run there."""
    min_architecture: int = 80
    """Of the GPUs that have what it takes."""


def find_checks() -> dict[str, Check]:
    """Return the checks of all operations, by "operation: name"."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*/checks.py")):
        operation = path.parent.name
        for check in importlib.import_module(f"kvern.kernels.{operation}.checks").checks():
            found[f"{operation}: {check.name}"] = check
    return found


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Fill what `torch.empty` returns with ones in every bit: NaN in floating point, -1 in whole numbers."""
    with mock.patch("torch.empty", _poisoned):
        yield


def _poisoned(*shape: Any, **options: Any) -> Tensor:
    out = _EMPTY(*shape, **options)
    return out.view(torch.uint8).fill_(0xFF).view(out.dtype) if out.dim() and out.is_contiguous() else out


def on_device(record: _T, device: torch.device) -> _T:
    """Return a copy of a dataclass, or a tuple of them and of tensors, on a device. What is neither stays."""
    if isinstance(record, Tensor):
        return record.to(device)  # type: ignore[return-value]
    if isinstance(record, tuple):
        return tuple(on_device(each, device) for each in record)  # type: ignore[return-value]
    if hasattr(record, "__dataclass_fields__"):
        moved = {each.name: on_device(getattr(record, each.name), device) for each in fields(record)}  # type: ignore[arg-type]
        return replace(record, **moved)  # type: ignore[type-var]
    return record


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare values of any float types. Raises AssertionError."""
    torch.testing.assert_close(
        actual.cpu().double(), expected.cpu().double(), atol=tolerance, rtol=tolerance, equal_nan=True
    )


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Compare bytes: NaN is as good as any other value. Raises AssertionError."""
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.dtype is expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), (
        "the bits are not the same"
    )
