"""Paged attention on a CPU, compiled by numba. It reads the blocks where they lie, and computes in float32.

A query's result is the same bits whatever it is computed with: alone or beside others, in a chunk or in a whole prompt.
Everything is added up in an order that depends on positions alone: scores by dimension, values by position, weights by
position modulo 16, and splits of 256 positions one after the other. What a query may not see adds exact zeros.

Threads are those of torch's own pool, so that no two pools fight over the cores. They take items as they get done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvern.kernels.cpu import Operation
from kvern.kernels.cpu_threads import run
from kvern.kernels.paged_attention.cpu_kernel import ITEM, Launch, load, scratch_size
from kvern.kernels.paged_attention.cpu_operations import SPLIT
from kvern.kernels.paged_attention.cpu_vectors import LANES
from kvern.kernels.paged_attention.step import Step

_MAX_QUERIES = 32
"""Of one work item."""


@dataclass(slots=True)
class Plan:
    """A step, ready to run for any layer."""

    launch: Launch
    items: NDArray[Any]
    counters: NDArray[np.int64]
    inputs: tuple[Any, ...]
    """What else the launch has addresses of."""
    num_threads: int
    workspace: tuple[Tensor, ...] = ()
    """Likewise, allocated when it is known how many query heads there are."""


def plan(kv: Tensor, step: Step) -> Plan:
    """Prepare a step."""
    query_starts, context_lens = step.cu_query_lens.tolist(), step.context_lens.tolist()
    items = _longest_first(np.array(list(_items(query_starts, context_lens)), dtype=ITEM))
    table, slots = step.block_table.contiguous(), step.slot_mapping.contiguous()
    num_kv_heads, num_threads = kv.shape[3], torch.get_num_threads()
    counters, finished = np.zeros(2, np.int64), np.zeros(len(slots) * num_kv_heads, np.int64)
    block, _, part, head, row = (stride * kv.element_size() for stride in kv.stride()[:5])
    depth = _filled_up(kv.shape[5], 4 * LANES // kv.element_size())
    zeros = torch.zeros(depth)
    launch = Launch(
        block_stride=block,
        part_stride=part,
        head_stride=head,
        row_stride=row,
        block_size=kv.shape[4],
        head_dim=kv.shape[5],
        depth=depth,
        num_kv_heads=num_kv_heads,
        table=table.data_ptr(),
        table_width=table.shape[1],
        slots=slots.data_ptr(),
        num_tokens=len(slots),
        items=items.ctypes.data,
        num_items=len(items),
        zeros=zeros.data_ptr(),
        finished=finished.ctypes.data,
        counters=counters.ctypes.data,
    )
    return Plan(launch, items, counters, (table, slots, zeros, finished), num_threads)


def _items(query_starts: list[int], context_lens: list[int]) -> Iterator[tuple[int, ...]]:
    """Part a step: a query over several splits into those, more queries into runs."""
    num_partials = 0
    for sequence, (begin, end) in enumerate(pairwise(query_starts)):
        first = context_lens[sequence] - (end - begin)
        num_splits = first // SPLIT + 1
        if end - begin == 1 and num_splits > 1:
            yield from ((sequence, begin, 1, first, split, num_partials) for split in range(num_splits))
            num_partials += num_splits
        else:
            for token in range(begin, end, _MAX_QUERIES):
                yield sequence, token, min(_MAX_QUERIES, end - token), first + token - begin, -1, 0


def _longest_first(items: NDArray[Any]) -> NDArray[Any]:
    """Order items so that threads that take them in turn are done at about the same time."""
    whole = items["count"] * (items["position"] + items["count"])
    split = np.minimum(items["position"] + 1 - items["split"] * SPLIT, SPLIT)
    ordered: NDArray[Any] = items[np.argsort(-np.where(items["split"] < 0, whole, split), kind="stable")]
    return ordered


def _filled_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def write_kv(kv: Tensor, layer: int, k: Tensor, v: Tensor, plan: Plan) -> None:
    """Store the step's keys and values of one layer."""
    launch, k, v = plan.launch, _with_whole_rows(k), _with_whole_rows(v)
    launch.memory = _address(kv, layer)
    launch.k, launch.k_stride = k.data_ptr(), k.stride(0) * k.element_size()
    launch.v, launch.v_stride = v.data_ptr(), v.stride(0) * v.element_size()
    run(load("write"), ctypes.addressof(launch), 1)


def paged_attention(
    q: Tensor, kv: Tensor, layer: int, plan: Plan, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attend one layer. Shapes as in the launcher."""
    launch, q, out = plan.launch, _with_whole_rows(q), torch.empty(q.shape, dtype=q.dtype)
    if launch.num_groups != q.shape[1] // kv.shape[3]:
        _allocate(plan, q.shape[1])
    launch.memory = _address(kv, layer)
    launch.q, launch.q_stride = q.data_ptr(), q.stride(0) * q.element_size()
    launch.out, launch.out_stride = out.data_ptr(), out.stride(0) * out.element_size()
    launch.scale, launch.window, launch.softcap = scale, window or 0, softcap or 0.0
    plan.counters[:] = 0
    run(load(str(q.dtype).removeprefix("torch.")), ctypes.addressof(launch), plan.num_threads)
    return out


def _address(kv: Tensor, layer: int) -> int:
    return kv.data_ptr() + layer * kv.stride(1) * kv.element_size()


def _with_whole_rows(tensor: Tensor) -> Tensor:
    """tensor: [num_tokens, heads, head_dim]. Tokens may lie apart, heads not."""
    together = tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]
    return tensor if together else tensor.contiguous()


def _allocate(plan: Plan, num_heads: int) -> None:
    launch, items = plan.launch, plan.items
    launch.num_groups = num_heads // launch.num_kv_heads
    launch.scratch_size = scratch_size(int(items["count"].max(initial=0)) * launch.num_groups, launch.depth)
    scratch = torch.empty(plan.num_threads * launch.scratch_size, dtype=torch.uint8)
    partials = torch.empty(int((items["split"] >= 0).sum()) * num_heads * (launch.depth + 2))
    launch.scratch, launch.partials = scratch.data_ptr(), partials.data_ptr()
    plan.workspace = scratch, partials


class LayerLaunches:
    """The launches of all layers at once, where a program finds them: nothing is left to do between layers."""

    def __init__(
        self,
        kv: Tensor,
        num_heads: int,
        scales: Sequence[float],
        windows: Sequence[int | None],
        softcaps: Sequence[float | None],
    ) -> None:
        """scales, windows, softcaps: of each layer, as `paged_attention` takes them."""
        num_layers = len(scales)
        self._num_heads, self._kv = num_heads, kv
        self._launches = np.zeros(num_layers, np.dtype(Launch))
        self._counters = np.zeros((num_layers, 2), np.int64)
        first, step = self._counters.ctypes.data, self._counters.strides[0]
        self._of_layers = {
            "memory": np.array([_address(kv, layer) for layer in range(num_layers)]),
            "counters": first + step * np.arange(num_layers),
            "scale": np.array(scales),
            "window": np.array([window or 0 for window in windows]),
            "softcap": np.array([softcap or 0.0 for softcap in softcaps]),
        }
        self._kernel = load(str(kv.dtype).removeprefix("torch."))

    def operation(self, layer: int) -> Operation:
        """Return a layer's attention as an operation."""
        return Operation(self._kernel, (), at=self._launches[layer:].ctypes.data)

    def prepare(self, plan: Plan, q: Tensor, out: Tensor) -> None:
        """Let all layers attend a step's queries, and write to `out`. Both: [num_tokens, num_heads, head_dim], whole
        rows."""
        if plan.launch.num_groups != self._num_heads // self._kv.shape[3]:
            _allocate(plan, self._num_heads)
        launch, size = plan.launch, q.element_size()
        launch.q, launch.q_stride = q.data_ptr(), q.stride(0) * size
        launch.out, launch.out_stride = out.data_ptr(), out.stride(0) * size
        self._launches[:] = np.ctypeslib.as_array(launch)
        for name, values in self._of_layers.items():
            self._launches[name] = values
        self._counters[:] = 0
