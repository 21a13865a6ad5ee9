"""Philox in Triton against the plain one, and the uniform numbers against the sampler's."""

from __future__ import annotations

import random

import torch
import triton
import triton.language as tl

from kvern.kernels import philox
from kvern.kernels.philox import kernel, reference


@triton.jit
def philox_kernel(words_ptr, out_ptr, count: tl.constexpr):
    offsets = tl.arange(0, count)
    k0, k1 = tl.load(words_ptr + offsets).to(tl.uint32), tl.load(words_ptr + count + offsets).to(tl.uint32)
    c0, c1 = tl.load(words_ptr + 2 * count + offsets), tl.load(words_ptr + 3 * count + offsets)
    c2, c3 = tl.load(words_ptr + 4 * count + offsets), tl.load(words_ptr + 5 * count + offsets)
    r0, r1, r2, r3 = kernel.philox4x32(k0, k1, c0.to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32))
    tl.store(out_ptr + offsets, r0.to(tl.int64))
    tl.store(out_ptr + count + offsets, r1.to(tl.int64))
    tl.store(out_ptr + 2 * count + offsets, r2.to(tl.int64))
    tl.store(out_ptr + 3 * count + offsets, r3.to(tl.int64))


@triton.jit
def uniform_kernel(seeds_ptr, positions_ptr, out_ptr):
    row = tl.program_id(0)
    tl.store(out_ptr + row, kernel.uniform53(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), 0))


def test_philox_of_random_keys_and_counters_equals_reference() -> None:
    source = random.Random(0)
    words = [[source.choice([0, 2**32 - 1, source.getrandbits(32)]) for _ in range(6)] for _ in range(64)]
    out = torch.full((4, 64), -1)
    philox_kernel[(1,)](torch.tensor(words).T.contiguous(), out, count=64)
    expected = [reference.philox4x32((k0, k1), tuple(counter)) for k0, k1, *counter in words]
    assert out.T.tolist() == [list(each) for each in expected]


def test_uniform_numbers_equal_those_of_torch() -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 12345678901234567])
    positions = torch.tensor([0, 7, 4096, 2**31, 1, 99])
    out = torch.full((6,), -1.0, dtype=torch.float64)
    uniform_kernel[(6,)](seeds, positions, out)
    zero = torch.zeros_like(seeds)
    key = (seeds & 0xFFFFFFFF, (seeds >> 32) & 0xFFFFFFFF)
    high, low, _, _ = philox.philox4x32(key, (positions, zero, zero, zero))
    assert torch.equal(out, philox.uniform53(high, low))
