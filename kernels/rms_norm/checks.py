"""RMSNorm against its definition, on odd shapes. What must be written is NaN before."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from kvern.kernels.check import Check, assert_close, name_of, poisoned_outputs
from kvern.kernels.rms_norm import add_rms_norm, reference, rms_norm

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""The interpreter cuts off what bfloat16 cannot hold, where a GPU rounds."""


def checks() -> Iterator[Check]:
    for dtype in TOLERANCE:
        for (num_tokens, size), unit_offset in product([(1, 1), (3, 63), (5, 123), (2, 2050)], (False, True)):
            name = f"{num_tokens} of {size}{', unit offset' * unit_offset}, {name_of(dtype)}"
            yield Check(name, partial(_check, num_tokens, size, unit_offset, dtype))
        for size, unit_offset in product([63, 123, 1000], (False, True)):
            name = f"sums of {size}{', unit offset' * unit_offset}, {name_of(dtype)}"
            yield Check(name, partial(_check_sum, size, unit_offset, dtype))
        yield Check(f"heads amid others, {name_of(dtype)}", partial(_check_heads, dtype))


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _check(num_tokens: int, size: int, unit_offset: bool, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = random(num_tokens, size + 1, dtype=dtype).to(device)[:, 1:], random(size, dtype=dtype).to(device)
    with poisoned_outputs():
        actual = rms_norm(x, weight, 1e-5, unit_offset=unit_offset)
    _compare(actual, reference.rms_norm(x.cpu(), weight.cpu(), 1e-5, unit_offset=unit_offset))


def _check_heads(dtype: torch.dtype, device: torch.device) -> None:
    heads, weight = random(7, 9, 48, dtype=dtype).to(device)[:, 2:7], random(48, dtype=dtype).to(device)
    with poisoned_outputs():
        actual = rms_norm(heads, weight, 1e-6)
    _compare(actual, reference.rms_norm(heads.cpu(), weight.cpu(), 1e-6))


def _check_sum(size: int, unit_offset: bool, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = random(5, size, dtype=dtype).to(device), random(size, dtype=dtype).to(device)
    residual = (3 * random(6, size + 2, dtype=dtype)).to(device)[1:, 2:]
    with poisoned_outputs():
        actual, total = add_rms_norm(x, residual, weight, 1e-5, unit_offset=unit_offset)
    expected = reference.add_rms_norm(x.cpu(), residual.cpu(), weight.cpu(), 1e-5, unit_offset=unit_offset)
    _compare(actual, expected[0])
    _compare(total, expected[1])


def _compare(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype is expected.dtype
    assert_close(actual, expected, TOLERANCE[expected.dtype])
