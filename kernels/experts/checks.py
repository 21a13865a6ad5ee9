"""Grouped experts against their definition, on odd shapes. What must be written is NaN before."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kvern.kernels.check import Check, assert_close, assert_same, name_of, on_device, poisoned_outputs
from kvern.kernels.experts import reference
from kvern.kernels.experts.grouped import experts

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}


def checks() -> Iterator[Check]:
    for num_tokens, num_experts, top_k in ((1, 1, 1), (5, 7, 3), (123, 2, 1)):
        inputs = partial(make_inputs, num_tokens, num_experts=num_experts, top_k=top_k)
        yield Check(f"{num_tokens} tokens, {top_k} of {num_experts} experts", partial(_check, inputs))
    for dtype in TOLERANCE:
        inputs = partial(make_inputs, 63, num_experts=3, top_k=3, dtype=dtype)
        yield Check(f"63 tokens, {name_of(dtype)}", partial(_check, inputs))
    large = partial(make_inputs, 2, hidden_size=600, size=131, dtype=torch.float16, scale=0.1)
    yield Check("sizes above one tile, float16", partial(_check, large))
    yield Check("tokens alone and in company", _check_company)


def make_inputs(
    num_tokens: int,
    *,
    num_experts: int = 6,
    top_k: int = 2,
    hidden_size: int = 63,
    size: int = 41,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.3).to(dtype)

    weights, ids = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k)
    gate_up, down = random(num_experts, 2 * size, hidden_size), random(num_experts, hidden_size, size)
    return random(num_tokens, hidden_size) * scale, gate_up, down, ids, weights


def computed(*inputs: Tensor) -> Tensor:
    with poisoned_outputs():
        return experts(*inputs)


def _check(make: partial[tuple[Tensor, ...]], device: torch.device) -> None:
    inputs = make()
    actual = computed(*on_device(inputs, device))
    assert actual.dtype is inputs[0].dtype
    assert_close(actual, reference.experts(*inputs), TOLERANCE[actual.dtype])


def _check_company(device: torch.device) -> None:
    x, gate_up, down, ids, weights = on_device(make_inputs(70), device)
    together = computed(x, gate_up, down, ids, weights)
    for row in (0, 41, 69):
        one = slice(row, row + 1)
        assert_same(computed(x[one], gate_up, down, ids[one], weights[one])[0], together[row])
