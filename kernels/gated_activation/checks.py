"""Gated activations against their definition, on odd shapes. What must be written is NaN before."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from kvern.kernels.check import Check, assert_close, name_of, poisoned_outputs
from kvern.kernels.gated_activation import GatedActivation, gated_activation, reference

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def checks() -> Iterator[Check]:
    shapes = [(1, 1), (3, 63), (5, 123), (2, 1500)]
    for (num_tokens, size), activation, dtype in product(shapes, GatedActivation, TOLERANCE):
        name = f"{activation.value} of {num_tokens} x {size}, {name_of(dtype)}"
        yield Check(name, partial(_check, num_tokens, size, activation, dtype))


def _check(num_tokens: int, size: int, activation: GatedActivation, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(size)
    x = (4 * torch.randn(num_tokens, 2 * size + 3, generator=generator)).to(device, dtype)[:, 3:]
    x[0, 0], x[-1, size - 1] = 90.0, -90.0
    with poisoned_outputs():
        actual = gated_activation(x, activation)
    assert actual.dtype is dtype
    assert_close(actual, reference.gated_activation(x.cpu(), activation), TOLERANCE[dtype])
