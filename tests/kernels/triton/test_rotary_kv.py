"""Rotation and KV write against their definition. Slots that nothing is written to are NaN before and after."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvern.engine.model.config import RopeConfig
from kvern.engine.model.rope import RotaryEmbedding, rotate
from kvern.kernels.rotary_kv import reference, rotary_kv

from .poison import poisoned_outputs

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 3, 6, 3, 16
LAYER = 1


class Inputs:
    """A step of 7 tokens, two of which are in the cache already."""

    def __init__(self, head_dim: int, rotary_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> None:
        generator = torch.Generator().manual_seed(head_dim)
        qkv = torch.randn(7, NUM_HEADS + 2 * NUM_KV_HEADS, head_dim, generator=generator).to(dtype)
        self.q, self.k, self.v = qkv.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        positions = torch.tensor([0, 5, 100, 101, 102, 7, 4000])
        self.rotation = RotaryEmbedding(RopeConfig(rotary_dim=rotary_dim, theta=10_000.0))(positions, dtype)
        self.slots = torch.tensor([3, -1, 79, 16, 48, -1, 15])
        shape = (5, NUM_LAYERS, 2, NUM_KV_HEADS, BLOCK_SIZE, head_dim)
        self.kv = torch.full(shape, float("nan"), dtype=dtype).to(kv_dtype or dtype)


def assert_equal_reference(inputs: Inputs, *, rotates: bool = True, scales: Tensor | None = None) -> None:
    rotation, expected_kv = inputs.rotation if rotates else None, inputs.kv.clone()
    arguments = (inputs.q, inputs.k, inputs.v, rotation)
    expected = reference.rotary_kv(*arguments, expected_kv, LAYER, inputs.slots, scales)
    with poisoned_outputs():
        actual = rotary_kv(*arguments, inputs.kv, LAYER, inputs.slots, scales)
    tolerance = TOLERANCE[inputs.q.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(inputs.kv.float(), expected_kv.float(), atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (128, 32), (6, 2)])
def test_rotary_kv_equals_reference(head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    assert_equal_reference(Inputs(head_dim, rotary_dim, dtype))


def test_rotary_kv_rotates_as_the_engine_does() -> None:
    inputs = Inputs(80, 32, torch.float32)
    actual = rotary_kv(inputs.q, inputs.k, inputs.v, inputs.rotation, inputs.kv, LAYER, inputs.slots)
    torch.testing.assert_close(actual, rotate(inputs.q, inputs.rotation), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_layer_that_does_not_rotate_keeps_queries_and_keys(dtype: torch.dtype) -> None:
    inputs = Inputs(64, 64, dtype)
    assert_equal_reference(inputs, rotates=False)
    assert torch.equal(inputs.kv[1, LAYER, 0, :, 0], inputs.k[3])


def test_layer_major_cache_equals_reference() -> None:
    inputs = Inputs(64, 64, torch.float32)
    inputs.kv = inputs.kv.transpose(0, 1).contiguous().transpose(0, 1)
    assert_equal_reference(inputs)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_fp8_cache_equals_reference(dtype: torch.dtype) -> None:
    """What is too great for fp8 becomes its greatest number, not NaN.

    Keys and values over their scale are what fp8 holds exactly: the interpreter rounds to it wrongly.
    """
    inputs = Inputs(64, 64, dtype, torch.float8_e4m3fn)
    scales = 2.0 ** torch.arange(-9, 9).view(2, NUM_LAYERS, NUM_KV_HEADS)
    for part, heads in enumerate((inputs.k, inputs.v)):
        heads.copy_(heads.to(torch.float8_e4m3fn).float() * scales[part, LAYER, :, None])
    inputs.v[0] = 6e4
    assert_equal_reference(inputs, rotates=False, scales=scales)
    assert (inputs.kv[0, LAYER, 1, :, 3].float() == 448.0).all()


def test_slots_of_a_large_pool_are_addressed_past_two_to_the_31() -> None:
    """8B strides: 32 layers, 8 KV heads of 128, blocks of 16. Memory that is not touched is not committed."""
    block_elements, block = 32 * 2 * 8 * 16 * 128, 4099
    storage = torch.UntypedStorage(2 * block_elements * (block + 1))
    kv = torch.tensor([], dtype=torch.bfloat16).set_(storage).view(-1, 32, 2, 8, 16, 128)
    heads = torch.randn(1, 8, 128).to(torch.bfloat16)
    rotary_kv(heads, heads, -heads, None, kv, 31, torch.tensor([block * 16 + 5]))
    assert torch.equal(kv[block, 31, :, :, 5], torch.cat((heads, -heads)))


def test_rotary_kv_of_what_does_not_fit_raises_value_error() -> None:
    inputs = Inputs(64, 64, torch.float32)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.rotation, inputs.kv, LAYER)
    with pytest.raises(ValueError, match=r"slot_mapping is \[7\] of torch.int32"):
        rotary_kv(*arguments, inputs.slots.int())
    with pytest.raises(ValueError, match="scales go with"):
        rotary_kv(*arguments, inputs.slots, torch.ones(2, NUM_LAYERS, NUM_KV_HEADS))
    with pytest.raises(ValueError, match=r"k is \[7, 2, 64\]"):
        rotary_kv(inputs.q, inputs.k[:, :2], *arguments[2:], inputs.slots)
