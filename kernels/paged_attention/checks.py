"""Paged attention's Triton kernels against the plain definition, on odd shapes.

Whatever must not be read is NaN, and so is what must be written.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kvern.kernels.check import Check, assert_close, assert_same, name_of, on_device, poisoned_outputs
from kvern.kernels.paged_attention import paged_attention, plan_attention
from kvern.kernels.paged_attention.configurations import SPLIT
from kvern.kernels.paged_attention.random_step import (
    LAYER,
    NUM_LAYERS,
    SCALE,
    RandomStep,
    attend_reference,
    make_step,
    run,
    run_reference,
)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}

_LENGTHS = {
    "decodes": ([1, 1, 1, 1, 1], [1, 63, 123, 257, SPLIT + 1]),
    "chunks": ([63, 123], [63, 130]),
    "mixed": ([1, 7, 1, 2], [40, 7, 300, 64]),
}
_SHAPES = [(2, 2, 8, 5), (8, 2, 80, 16), (8, 1, 128, 32), (5, 1, 64, 1), (9, 3, 64, 16), (40, 1, 8, 16)]
_HALVES = (torch.bfloat16, torch.float32)


def checks() -> Iterator[Check]:
    for name, lengths in _LENGTHS.items():
        for dtype in TOLERANCE:
            step = partial(make_step, *lengths, num_heads=4, num_kv_heads=1, dtype=dtype)
            yield Check(f"{name}, {name_of(dtype)}", partial(_check, step))
    for num_heads, num_kv_heads, head_dim, block_size in _SHAPES:
        step = partial(
            make_step,
            [1, 9, 1, 3],
            [33, 21, 7, 3],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
        )
        name = f"{num_heads} heads of {head_dim}, {num_kv_heads} of KV, blocks of {block_size}"
        yield Check(name, partial(_check, step))
    for window, softcap in ((1, None), (16, 0.5), (37, None), (1000, 0.5), (None, 0.5)):
        step = partial(make_step, [1, 7, 1, 40], [40, 7, 550, 150], num_heads=4, num_kv_heads=1)
        yield Check(f"window {window}, cap {softcap}", partial(_check, step, window=window, softcap=softcap))
    yield Check("layer-major KV", partial(_check, partial(make_step, [1, 20, 1], [50, 30, 5], layer_major=True)))
    for softcap in (None, 2.0):
        for name, lengths in (("decodes", ([1, 1], [63, 600])), ("mixed", ([9, 1], [70, 20]))):
            check = partial(_check_fp8, *lengths, softcap)
            yield Check(f"fp8 KV, {name}, cap {softcap}", check, min_architecture=90)
    yield Check("a pool past two to the 31", _check_large_pool)
    for dtype in _HALVES:
        yield Check(f"the same bits alone and in company, {name_of(dtype)}", partial(_check_company, dtype))
        for pieces, window in (([30, 70, 100], None), ([30, 70, 100], 50), ([2] * 3 + [194], None), ([199, 1], None)):
            name = f"the same bits in {len(pieces)} chunks, window {window}, {name_of(dtype)}"
            yield Check(name, partial(_check_chunks, dtype, pieces, window))


def _check(
    make: partial[RandomStep], device: torch.device, *, window: int | None = None, softcap: float | None = None
) -> None:
    expected = run_reference(make(), window, softcap)
    _compare(_run(on_device(make(), device), window, softcap), expected)


def _run(step: RandomStep, window: int | None = None, softcap: float | None = None, **options: Tensor) -> Tensor:
    with poisoned_outputs():
        return run(step, window, softcap, backend="triton", **options)


def _compare(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, TOLERANCE[actual.dtype])


def _check_fp8(query_lens: list[int], context_lens: list[int], softcap: float | None, device: torch.device) -> None:
    """Each layer and head has its scales; a value too large for fp8 is held to the largest."""
    step = make_step(query_lens, context_lens, num_heads=4, num_kv_heads=2, dtype=torch.float16)
    scales = torch.rand(2, NUM_LAYERS, 2, generator=torch.Generator().manual_seed(0)) * 0.02 + 0.005
    step.k[0, 0, 0], step.v[0, 1, 3] = 100.0, -100.0
    factors = scales.transpose(0, 1)[..., None, None]
    step.kv = (step.kv.float() / factors).clamp(-448, 448).to(torch.float8_e4m3fn)
    there = on_device(step, device)
    attended = _run(there, softcap=softcap, kv_scales=scales.to(device))
    step.kv = there.kv.cpu().float() * factors
    _compare(attended, attend_reference(step, softcap=softcap))
    block, offset = divmod(int(step.slot_mapping[0]), 16)
    assert_close(step.kv[block, LAYER, 0, 0, offset, 0], 448 * scales[0, LAYER, 0], 1e-6)
    assert_close(step.kv[block, LAYER, 1, 1, offset, 3], -448 * scales[1, LAYER, 1], 1e-6)


def _check_company(dtype: torch.dtype, device: torch.device) -> None:
    """Decodes of several splits, and chunks, each with another company."""
    query_lens, context_lens = [1, 1, 30, 5], [1100, 3, 90, 5]
    crowd = on_device(make_step(query_lens, context_lens, num_heads=4, num_kv_heads=1, dtype=dtype), device)
    together = _run(crowd)
    for row, (count, length) in enumerate(zip(query_lens, context_lens, strict=True)):
        begin = sum(query_lens[:row])
        tokens = slice(begin, begin + count)
        assert_same(_attend_part(crowd, row, tokens, length, None), together[tokens])


def _check_chunks(dtype: torch.dtype, pieces: list[int], window: int | None, device: torch.device) -> None:
    """A chunk of one token takes the path of decodes, and is equal but for rounding."""
    step = on_device(make_step([200], [200], num_heads=4, num_kv_heads=2, dtype=dtype), device)
    whole = _run(step, window)
    done = 0
    for count in pieces:
        tokens = slice(done, done + count)
        done += count
        attended = _attend_part(step, 0, tokens, done, window)
        if count == 1:
            _compare(attended, whole[tokens])
        else:
            assert_same(attended, whole[tokens])


def _attend_part(step: RandomStep, row: int, tokens: slice, context_len: int, window: int | None) -> Tensor:
    """Attend some query tokens of one sequence, whose KV is written, in a step of their own."""
    device = step.q.device
    with poisoned_outputs():
        metadata = plan_attention(
            step.kv,
            step.block_table[row : row + 1],
            torch.tensor([0, tokens.stop - tokens.start], dtype=torch.int32, device=device),
            torch.tensor([context_len], dtype=torch.int32, device=device),
            step.slot_mapping[tokens],
            (window,),
            backend="triton",
        )
        return paged_attention(step.q[tokens], step.kv, LAYER, metadata, SCALE, sliding_window=window)


def _check_large_pool(device: torch.device) -> None:
    """8B strides: 32 layers, 8 KV heads of 128, blocks of 16. A CPU commits only what is touched."""
    small = make_step([1, 3], [40, 20], num_heads=8, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    needed = len(small.kv)
    kv = torch.empty(4096 + needed, 32, 2, 8, 16, 128, dtype=torch.bfloat16, device=device)
    kv[4096:, LAYER] = small.kv[:, LAYER].to(device)
    expected = run_reference(small)
    small.slot_mapping = small.slot_mapping + 4096 * 16
    small.block_table = torch.where(small.block_table < needed, small.block_table + 4096, small.block_table)
    small.kv = kv
    _compare(_run(on_device(small, device)), expected)
