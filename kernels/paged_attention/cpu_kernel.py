"""The loops of attention on a CPU, compiled by numba: what a thread does, and what it does for one work item.

A work item is a run of queries of one sequence and one KV head. Its rows are queries times the query heads that share
the KV head. Positions are taken in splits, each with a softmax of its own, and splits are merged in order. Splits begin
at multiples of their size whatever a step holds, so that one query over a long context can be many items, a split each.
"""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np

from kvern.kernels.paged_attention import cpu_operations, cpu_vectors
from kvern.kernels.paged_attention.cpu_operations import (
    MAX_ROWS,
    SPLIT,
    add_atomically,
    add_values,
    address_of,
    cap,
    copy,
    fetch,
    load_query,
    merge,
    pack_keys,
    score,
    weigh,
    write_row,
)
from kvern.kernels.paged_attention.cpu_vectors import LANES

_TILE = 64
"""Positions whose keys are packed, or values added, for all rows in turn: what the nearest cache holds."""

_FLOAT = 4
"""Bytes."""

ITEM = np.dtype([(name, np.int64) for name in ("sequence", "token", "count", "position", "split", "partial")])
"""A run of queries: `count` of them from row `token` of q on, the first at `position` of its context.

split: the one to attend of a query whose splits are items, else -1. partial: where the first of its splits is kept.
"""


class Launch(ctypes.Structure):
    """What a launch is given: addresses, and sizes in bytes where they are strides."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("q", "q_stride", "out", "out_stride", "k", "k_stride", "v", "v_stride")),
        *((name, ctypes.c_int64) for name in ("memory", "block_stride", "part_stride", "head_stride", "row_stride")),
        *((name, ctypes.c_int64) for name in ("block_size", "head_dim", "depth", "num_groups", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("table", "table_width", "slots", "num_tokens", "items", "num_items")),
        *((name, ctypes.c_int64) for name in ("zeros", "scratch", "scratch_size", "partials", "finished", "counters")),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]
    # memory: the layer's keys in block 0; depth: head_dim, filled up to whole registers;
    # num_groups: query heads that share a KV head; partials: [num_splits, num_heads, depth + 2] floats;
    # finished: [num_tokens, num_kv_heads] int64, splits that are done, 0 between launches;
    # counters: [2] int64, threads that began and steps that were taken; zeros: [depth] floats;
    # window: 0 where there is none.


class _Scratch(NamedTuple):
    """Addresses of a thread's own memory for one item and KV head, and how many rows that is."""

    rows: int
    queries: int
    """[rows, depth]."""
    packed: int
    """[_TILE / 16, depth, 16] keys."""
    scores: int
    """[rows, SPLIT], then weights."""
    sums: int
    """[rows, depth] of one split."""
    states: int
    """[rows, 2], maximum and sum of the weights of one split."""
    totals: int
    """[rows, depth] of all splits."""
    total_states: int


def scratch_size(max_rows: int, depth: int) -> int:
    """Return the bytes of a thread's memory, for items of so many rows."""
    floats = max_rows * (3 * depth + SPLIT + 4) + _TILE * depth
    return -(-(floats * _FLOAT + 4 * SPLIT * 8) // 4096) * 4096


_SIGNATURE = numba.types.void(numba.types.CPointer(numba.from_dtype(np.dtype(Launch))))

_compiled = numba.njit(nogil=True, error_model="numpy")

_inlined = numba.njit(nogil=True, error_model="numpy", inline="always")
"""For what the operations are in that take long to compile: LLVM compiles a function again with each that calls it."""


@_compiled
def _ints(address, count):  # type: ignore[no-untyped-def]
    return numba.carray(address_of(address), (count,), np.int64)


@_compiled
def _floats(address, count):  # type: ignore[no-untyped-def]
    return numba.carray(address_of(address), (count,), np.float32)


@_compiled
def _begin(launch, item):  # type: ignore[no-untyped-def]
    """Return the first position that any query of an item sees."""
    return max(0, item.position - launch.window + 1) if launch.window else 0


@_compiled
def _seen(launch, item, row, count, at):  # type: ignore[no-untyped-def]
    """Return which positions some rows see of the split at position `at`, counted from there: [low, high)."""
    first, last = item.position - at, item.position - at
    if item.count > 1:
        first, last = first + row // launch.num_groups, last + (row + count - 1) // launch.num_groups
    return max(first - launch.window + 1, 0) if launch.window else 0, min(last + 1, SPLIT)


@_compiled
def _locate(launch, item, head, at, addresses):  # type: ignore[no-untyped-def]
    """Write the addresses of a split's keys, [SPLIT], then of its values. Keys that no query sees are zeros."""
    width = launch.table_width
    table = numba.carray(address_of(launch.table + item.sequence * width * 4), (width,), np.int32)
    keys, values = _ints(addresses, SPLIT), _ints(addresses + SPLIT * 8, SPLIT)
    first = launch.memory + head * launch.head_stride
    position, end = max(_begin(launch, item), at), min(at + SPLIT, item.position + item.count)
    keys[: position - at] = launch.zeros
    while position < end:
        block = position // launch.block_size
        offset = position - block * launch.block_size
        row = first + table[block] * launch.block_stride + offset * launch.row_stride
        stop = min(position + launch.block_size - offset, end)
        for lane in range(position - at, stop - at):
            keys[np.uint64(lane)] = row
            values[np.uint64(lane)] = row + launch.part_stride
            row += launch.row_stride
        position = stop
    keys[end - at : end - at + LANES] = launch.zeros


@_compiled
def _rows_together(rows):  # type: ignore[no-untyped-def]
    return -(-rows // -(-rows // MAX_ROWS))


@_inlined
def _score_tile(launch, item, s, element, at, tile, end, keys, ahead):  # type: ignore[no-untyped-def]
    """Score the keys of the tile at `tile` of a split for all rows that see any."""
    depth, together = launch.depth, _rows_together(s.rows)
    for lane in range(tile, min(tile + _TILE, end), LANES):
        packed = s.packed + (lane - tile) * depth * _FLOAT
        pack_keys(element, packed, keys + lane * 8, ahead + lane * 8, launch.head_dim)
    for row in range(0, s.rows, together):
        count = min(together, s.rows - row)
        low, high = _seen(launch, item, row, count, at)
        if low < tile + _TILE and tile < high:
            groups = -(-(min(tile + _TILE, high) - tile) // LANES)
            scores, queries = s.scores + (row * SPLIT + tile) * _FLOAT, s.queries + row * depth * _FLOAT
            later = ahead + (SPLIT + tile) * 8
            score(element, scores, count, queries, s.packed, later, groups, launch.head_dim, depth)


@_compiled
def _weigh_rows(launch, item, s, at, row, count):  # type: ignore[no-untyped-def]
    """Turn the scores of some rows into weights, 0 where a row does not see what another does."""
    low, high = _seen(launch, item, row, count, at)
    low = low // LANES * LANES
    groups = -(-(high - low) // LANES)
    for each in range(row, row + count):
        address = s.scores + (each * SPLIT + low) * _FLOAT
        scale = launch.scale
        if launch.softcap > 0:
            cap(address, groups, scale, launch.softcap)
            scale = np.float32(1.0)
        own_low, own_high = _seen(launch, item, each, 1, at)
        scores = _floats(address, groups * LANES)
        scores[: own_low - low] = -np.inf
        scores[own_high - low :] = -np.inf
        weigh(address, groups, scale, s.states + each * 2 * _FLOAT)


@_inlined
def _attend_split(launch, item, s, element, at, here, there):  # type: ignore[no-untyped-def]
    """Attend the split at position `at` for all rows. here, there: addresses of its KV, and of what comes next."""
    depth, together = launch.depth, _rows_together(s.rows)
    start = max(_begin(launch, item) - at, 0) // LANES * LANES
    end = min(at + SPLIT, item.position + item.count) - at
    for tile in range(start, end, _TILE):
        _score_tile(launch, item, s, element, at, tile, end, here, there)
    _floats(s.sums, s.rows * depth)[:] = 0.0
    for row in range(0, s.rows, together):
        count = min(together, s.rows - row)
        low, high = _seen(launch, item, row, count, at)
        if low < high:
            _weigh_rows(launch, item, s, at, row, count)
    values = here + SPLIT * 8
    for tile in range(start, end, _TILE):
        for row in range(0, s.rows, together):
            count = min(together, s.rows - row)
            low, high = _seen(launch, item, row, count, at)
            low, high = max(low, tile), min(high, tile + _TILE)
            if low < high:
                sums, weights = s.sums + row * depth * _FLOAT, s.scores + row * SPLIT * _FLOAT
                ahead = there + SPLIT * 8 if row == 0 else values
                add_values(element, sums, count, weights, values, ahead, low, high, launch.head_dim, depth)


@_inlined
def _attend_splits(launch, item, head, s, element, here, there):  # type: ignore[no-untyped-def]
    """Attend all splits that an item's rows see into its totals; or one that is an item, which is kept.

    Returns whether it was the only one: then its sums are the totals.
    """
    depth, first, last = launch.depth, _begin(launch, item) // SPLIT, (item.position + item.count - 1) // SPLIT
    is_only = item.split < 0 and first == last
    if item.split >= 0:
        first, last = max(first, item.split), item.split
    for split in range(first, last + 1):
        at = split * SPLIT
        if split > first:
            _locate(launch, item, head, at, here)
        _attend_split(launch, item, s, element, at, here, there)
        for row in range(s.rows):
            sums, state = s.sums + row * depth * _FLOAT, s.states + row * 2 * _FLOAT
            low, high = _seen(launch, item, row, 1, at)
            if item.split >= 0:
                partial = _partial(launch, item, split, head, row)
                copy(partial, sums, depth * _FLOAT)
                copy(partial + depth * _FLOAT, state, 2 * _FLOAT)
            elif low < high and not is_only:
                merge(s.totals + row * depth * _FLOAT, s.total_states + row * 2 * _FLOAT, sums, state, depth)
    return is_only


@_compiled
def _partial(launch, item, split, head, row):  # type: ignore[no-untyped-def]
    """Return where the sums of one row and split are kept, its state after them."""
    index = (item.partial + split) * launch.num_kv_heads * launch.num_groups + head * launch.num_groups + row
    return launch.partials + index * (launch.depth + 2) * _FLOAT


@_compiled
def _is_done(launch, item, head):  # type: ignore[no-untyped-def]
    """Whether all splits of a query are kept, asked once after each: yes once."""
    num_splits = item.position // SPLIT + 1
    finished = launch.finished + (item.token * launch.num_kv_heads + head) * 8
    if add_atomically(finished, 1) < num_splits - 1:
        return False
    add_atomically(finished, -num_splits)
    return True


@_compiled
def _join(launch, item, head, s):  # type: ignore[no-untyped-def]
    """Merge a query's splits that are kept into its totals."""
    size = launch.depth * _FLOAT
    for row in range(s.rows):
        for split in range(_begin(launch, item) // SPLIT, item.position // SPLIT + 1):
            partial = _partial(launch, item, split, head, row)
            merge(s.totals + row * size, s.total_states + row * 2 * _FLOAT, partial, partial + size, launch.depth)


@_compiled
def _lay_out(launch, item, memory):  # type: ignore[no-untyped-def]
    rows, depth = item.count * launch.num_groups, launch.depth
    packed = memory + rows * depth * _FLOAT
    scores = packed + _TILE * depth * _FLOAT
    sums = scores + rows * SPLIT * _FLOAT
    totals = sums + rows * depth * _FLOAT
    states = totals + rows * depth * _FLOAT
    return _Scratch(rows, memory, packed, scores, sums, states, totals, states + rows * 2 * _FLOAT)


@_compiled
def _begin_item(launch, item, head, element, s):  # type: ignore[no-untyped-def]
    for row in range(s.rows):
        query = launch.q + (item.token + row // launch.num_groups) * launch.q_stride
        query += (head * launch.num_groups + row % launch.num_groups) * launch.row_stride
        load_query(element, s.queries + row * launch.depth * _FLOAT, query, launch.head_dim)
    _floats(s.totals, s.rows * launch.depth)[:] = 0.0
    states = _floats(s.total_states, s.rows * 2)
    states[0::2], states[1::2] = -np.inf, 0.0


@_compiled
def _end_item(launch, item, head, element, totals, states):  # type: ignore[no-untyped-def]
    for row in range(item.count * launch.num_groups):
        out = launch.out + (item.token + row // launch.num_groups) * launch.out_stride
        out += (head * launch.num_groups + row % launch.num_groups) * launch.row_stride
        write_row(element, out, totals + row * launch.depth * _FLOAT, states + row * 2 * _FLOAT, launch.head_dim)


@_inlined
def _attend_item(launch, item, head, element, memory, here, there):  # type: ignore[no-untyped-def]
    s = _lay_out(launch, item, memory)
    _begin_item(launch, item, head, element, s)
    is_done, totals, states = item.split < 0, s.totals, s.total_states
    if _attend_splits(launch, item, head, s, element, here, there):
        totals, states = s.sums, s.states
    if item.split >= 0 and _is_done(launch, item, head):
        _join(launch, item, head, s)
        is_done = True
    if is_done:
        _end_item(launch, item, head, element, totals, states)


@_compiled
def _locate_step(launch, items, step, addresses):  # type: ignore[no-untyped-def]
    if step < len(items) * launch.num_kv_heads:
        item = items[step // launch.num_kv_heads]
        at = max(item.split, _begin(launch, item) // SPLIT) * SPLIT
        _locate(launch, item, step % launch.num_kv_heads, at, addresses)


@_inlined
def _attend(pointer, element):  # type: ignore[no-untyped-def]
    """Attend items until none is left. Where the next item's keys lie is known early, so that they can be fetched."""
    launch = numba.carray(pointer, 1)[0]
    items = numba.carray(address_of(launch.items), (launch.num_items,), ITEM)
    memory = launch.scratch + add_atomically(launch.counters, 1) * launch.scratch_size
    here, there = memory, memory + 2 * SPLIT * 8
    memory += 4 * SPLIT * 8
    step = add_atomically(launch.counters + 8, 1)
    _locate_step(launch, items, step, here)
    fetch(here, 2 * SPLIT, launch.row_stride)
    while step < len(items) * launch.num_kv_heads:
        following = add_atomically(launch.counters + 8, 1)
        _locate_step(launch, items, following, there)
        item, head = items[step // launch.num_kv_heads], step % launch.num_kv_heads
        _attend_item(launch, item, head, element, memory, here, there)
        step, here, there = following, there, here


@_compiled
def _write(pointer):  # type: ignore[no-untyped-def]
    """Store keys and values of tokens that have a slot."""
    launch = numba.carray(pointer, 1)[0]
    slots = _ints(launch.slots, launch.num_tokens)
    for token in range(launch.num_tokens):
        if slots[token] >= 0:
            block, offset = slots[token] // launch.block_size, slots[token] % launch.block_size
            row = launch.memory + block * launch.block_stride + offset * launch.row_stride
            for head in range(launch.num_kv_heads):
                at = head * launch.row_stride
                copy(row, launch.k + token * launch.k_stride + at, launch.row_stride)
                copy(row + launch.part_stride, launch.v + token * launch.v_stride + at, launch.row_stride)
                row += launch.head_stride


def _entries(sources: str) -> dict[str, Any]:
    """Return what threads run, by name. sources: what numba keeps is taken for old when this is another string."""

    def bfloat16(pointer):  # type: ignore[no-untyped-def]
        if sources:
            _attend(pointer, np.uint16)

    def float16(pointer):  # type: ignore[no-untyped-def]
        if sources:
            _attend(pointer, np.float16)

    def float32(pointer):  # type: ignore[no-untyped-def]
        if sources:
            _attend(pointer, np.float32)

    def write(pointer):  # type: ignore[no-untyped-def]
        if sources:
            _write(pointer)

    return {function.__name__: function for function in (bfloat16, float16, float32, write)}


@cache
def load(name: str) -> Any:
    """Return a numba function to be called by its `address`, with that of a `Launch`: "write", or a type's attention.

    Compiles it unless that was done before: seconds.
    """
    files = (__file__, cpu_operations.__file__, cpu_vectors.__file__)
    sources = hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()
    function = _entries(sources)[name]
    options = {"nopython": True, "error_model": "numpy"}
    try:
        compiled = numba.cfunc(_SIGNATURE, cache=True, **options)(function)
    except RuntimeError:  # no folder that could be written to
        compiled = numba.cfunc(_SIGNATURE, **options)(function)
    return compiled
