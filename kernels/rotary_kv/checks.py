"""Rotation and KV write against their definition. Slots that nothing is written to are NaN before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from kvern.kernels.check import Check, assert_close, assert_same, name_of, on_device, poisoned_outputs
from kvern.kernels.rotary_kv import reference, rotary_kv

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 3, 6, 3, 16
LAYER = 1

_POSITIONS = (0, 5, 100, 101, 102, 7, 4000)
_SLOTS = (3, -1, 79, 16, 48, -1, 15)


@dataclass(frozen=True, slots=True)
class Inputs:
    """A step of 7 tokens, two of which are in the cache already."""

    qkv: Tensor
    """[7, heads, head_dim], of which queries, keys and values are parts."""
    rotation: tuple[Tensor, Tensor] | None
    kv: Tensor
    slots: Tensor
    scales: Tensor | None = None

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, strided as in the engine."""
        q, k, v = torch.split(self.qkv, [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        return q, k, v


def checks() -> Iterator[Check]:
    for (head_dim, rotary_dim), dtype in product(((64, 64), (80, 80), (128, 32), (6, 2)), TOLERANCE):
        name = f"{rotary_dim} of {head_dim} a head, {name_of(dtype)}"
        yield Check(name, partial(_check, partial(make_inputs, head_dim, rotary_dim, dtype)))
    for dtype in TOLERANCE:
        name = name_of(dtype)
        yield Check(f"no rotation, {name}", partial(_check, partial(make_inputs, 64, 0, dtype)))
        yield Check(f"fp8 KV, {name}", partial(_check_fp8, dtype), min_architecture=90)
    yield Check("layer-major KV", partial(_check, _make_layer_major))
    yield Check("a pool past two to the 31", _check_large_pool)


def make_inputs(head_dim: int, rotary_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> Inputs:
    """rotary_dim 0: a layer that does not rotate."""
    generator = torch.Generator().manual_seed(head_dim)
    qkv = torch.randn(7, NUM_HEADS + 2 * NUM_KV_HEADS, head_dim, generator=generator).to(dtype)
    shape = (5, NUM_LAYERS, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim)
    kv = torch.full(shape, float("nan"), dtype=dtype).to(kv_dtype or dtype)
    return Inputs(qkv, _rotation(rotary_dim, dtype) if rotary_dim else None, kv, torch.tensor(_SLOTS))


def _rotation(rotary_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequencies = 10_000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = (torch.tensor(_POSITIONS)[:, None] * frequencies)[:, None]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def _make_layer_major() -> Inputs:
    inputs = make_inputs(64, 64, torch.float32)
    return replace(inputs, kv=inputs.kv.transpose(0, 1).contiguous().transpose(0, 1))


def _check(make: Callable[[], Inputs], device: torch.device) -> None:
    _compare(make(), device)


def _check_fp8(dtype: torch.dtype, device: torch.device) -> None:
    """What is too great for fp8 becomes its greatest number, not NaN.

    Keys and values over their scale are what fp8 holds exactly: the interpreter rounds to it wrongly.
    """
    inputs = make_inputs(64, 0, dtype, torch.float8_e4m3fn)
    scales = 2.0 ** torch.arange(-9, 9).view(2, NUM_LAYERS, NUM_KV_HEADS)
    _, k, v = inputs.heads()
    for part, heads in enumerate((k, v)):
        heads.copy_(heads.to(torch.float8_e4m3fn).float() * scales[part, LAYER, :, None])
    v[0] = 6e4
    written = _compare(replace(inputs, scales=scales), device)
    assert bool((written[0, LAYER, 1, :, 3].float() == 448.0).all())


def _compare(inputs: Inputs, device: torch.device) -> Tensor:
    """Return the KV that the kernel wrote."""
    there = on_device(inputs, device)
    kv = there.kv.clone()
    with poisoned_outputs():
        actual = rotary_kv(*there.heads(), there.rotation, kv, LAYER, there.slots, there.scales)
    expected = reference.rotary_kv(*inputs.heads(), inputs.rotation, inputs.kv, LAYER, inputs.slots, inputs.scales)
    tolerance = TOLERANCE[inputs.qkv.dtype]
    assert actual.dtype is expected.dtype
    assert_close(actual, expected, tolerance)
    assert_close(kv.float(), inputs.kv.float(), tolerance)
    return kv


def _check_large_pool(device: torch.device) -> None:
    """8B strides: 32 layers, 8 KV heads of 128, blocks of 16. A CPU commits only what is touched."""
    block = 4099
    kv = torch.empty(block + 1, 32, 2, 8, 16, 128, dtype=torch.bfloat16, device=device)
    heads = torch.randn(1, 8, 128, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    rotary_kv(heads, heads, -heads, None, kv, 31, torch.tensor([block * 16 + 5], device=device))
    assert_same(kv[block, 31, :, :, 5], torch.cat((heads, -heads)))
