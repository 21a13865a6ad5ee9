"""Memory that launchers allocate, filled with what no kernel computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

_EMPTY = torch.empty


def _poisoned(*shape: Any, **options: Any) -> Tensor:
    out = _EMPTY(*shape, **options)
    return out.view(torch.uint8).fill_(0xFF).view(out.dtype) if out.dim() and out.is_contiguous() else out


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Fill what `torch.empty` returns with ones in every bit: NaN in floating point, -1 in whole numbers."""
    with mock.patch("torch.empty", _poisoned):
        yield
