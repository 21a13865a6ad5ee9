"""Rounding of rows against the same in torch, on odd shapes. What must be written is NaN before.

The interpreter rounds to fp8 wrongly, and makes a number of NaN. There rows hold what fp8 holds exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kvern.kernels.check import Check, assert_close, assert_same, name_of, poisoned_outputs
from kvern.kernels.fp8_linear import FP8, fp8_linear, kernel, quantize_rows, reference

_MAX = 448.0


def checks() -> Iterator[Check]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for num_rows, size in ((1, 1), (3, 63), (5, 123), (2, 2050)):
            name = f"{num_rows} rows of {size}, {name_of(dtype)}"
            yield Check(name, partial(_check_rows, num_rows, size, dtype), min_architecture=90)
    yield Check("rows of zeros, and one with NaN", _check_odd_rows, min_architecture=90)
    for dtype in (torch.bfloat16, torch.float16):
        for num_tokens in (1, 7, 64, 123):
            name = f"product of {num_tokens} tokens, {name_of(dtype)}"
            yield Check(name, partial(_check_product, num_tokens, dtype), min_architecture=90)


def _check_rows(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(size)
    numbers = torch.randn(num_rows, size + 1, generator=generator).exp()
    if device.type == "cpu":
        numbers = numbers.to(FP8).float()
        numbers[:, 1] = _MAX
    x = (numbers / 64).to(dtype).to(device)[:, 1:]
    with poisoned_outputs():
        values, scales = kernel.quantize_rows(x)
    rows = x.cpu().float()
    expected = rows.abs().amax(dim=1, keepdim=True) / _MAX
    assert_same(scales, expected)
    assert_same(values, (rows / expected).clamp(-_MAX, _MAX).half().to(FP8))


def _check_odd_rows(device: torch.device) -> None:
    x = torch.zeros(3, 40)
    x[1, 7], x[2, 3] = float("nan"), -7.0
    if device.type == "cpu":
        x = x[::2]
    with poisoned_outputs():
        values, scales = kernel.quantize_rows(x.to(device))
    assert_close(values.cpu().float() * scales.cpu(), x, 0)
    assert scales[0].item() == 1


def _check_product(num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 192, generator=generator).to(dtype)
    weight, scales = quantize_rows(torch.randn(272, 192, generator=generator))
    actual = fp8_linear(x.to(device), weight.to(device), scales.to(device))
    expected = reference.fp8_linear(x, weight, scales)
    assert actual.dtype is dtype
    assert_close(actual / float(expected.abs().max()), expected / expected.abs().max(), 1e-2)
