"""What every attention backend is given, and what it gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SplitList:
    """Device memory for the decode work of a step under one sliding window. Every plan that is given it rewrites it."""

    starts: Tensor
    """[num_seqs + 1 or more] int32: where the items of each sequence begin."""
    items: Tensor
    """[num_items, 2] int32: sequence, and which split of its context."""


@dataclass(frozen=True, slots=True)
class Step:
    """Where the tokens of one step lie. Shapes as in `plan_attention`."""

    block_table: Tensor
    cu_query_lens: Tensor
    context_lens: Tensor
    slot_mapping: Tensor
    windows: frozenset[int | None]
    max_query_len: int | None
    """1: every sequence has one query token. None: not known on the host."""
    kv_scales: Tensor | None
    split_lists: Mapping[int | None, SplitList] | None


class Backend(Protocol):
    """A way to compute attention: a module with these three functions."""

    def plan(self, kv: Tensor, step: Step) -> Any:
        """Prepare a step, for every layer."""

    def write_kv(self, kv: Tensor, layer: int, k: Tensor, v: Tensor, plan: Any) -> None:
        """Store the step's keys and values of one layer."""

    def paged_attention(
        self, q: Tensor, kv: Tensor, layer: int, plan: Any, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attend one layer. Shapes as in the launcher."""


def distinct_windows(windows: Iterable[int | None]) -> frozenset[int | None]:
    """Return each once. Raises ValueError for a window of no token."""
    distinct = frozenset(windows)
    if any(window is not None and window < 1 for window in distinct):
        raise ValueError(f"sliding windows are {sorted(map(str, distinct))}; at least one token is needed")
    return distinct


def check_kv_scales(kv: Tensor, scales: Tensor | None) -> None:
    """Raise ValueError unless there are scales for KV in fp8, of the right shape, and none for other KV."""
    if (kv.dtype is torch.float8_e4m3fn) != (scales is not None):
        raise ValueError(f"kv is of {kv.dtype}; scales are for float8_e4m3fn, which needs them")
    if scales is None:
        return
    expected = [2, kv.shape[1], kv.shape[3]]
    if list(scales.shape) != expected or scales.dtype is not torch.float32:
        raise ValueError(f"kv_scales is {list(scales.shape)} of {scales.dtype}; {expected} of float32 is needed")
