"""Rotation and KV write against their definition. Slots that nothing is written to are NaN before and after."""

from __future__ import annotations

import pytest
import torch

from kvern.engine.model.config import RopeConfig
from kvern.engine.model.rope import RotaryEmbedding, rotate
from kvern.kernels.check import Check
from kvern.kernels.rotary_kv import rotary_kv
from kvern.kernels.rotary_kv.checks import LAYER, NUM_KV_HEADS, NUM_LAYERS, checks, make_inputs


@pytest.mark.parametrize("check", list(checks()), ids=lambda check: check.name)
def test_rotary_kv_equals_reference(check: Check) -> None:
    check.run(torch.device("cpu"))


def test_rotary_kv_rotates_as_the_engine_does() -> None:
    inputs = make_inputs(80, 32, torch.float32)
    q, k, v = inputs.heads()
    rotation = RotaryEmbedding(RopeConfig(rotary_dim=32, theta=10_000.0))(torch.arange(len(q)), q.dtype)
    actual = rotary_kv(q, k, v, rotation, inputs.kv, LAYER, inputs.slots)
    torch.testing.assert_close(actual, rotate(q, rotation), atol=1e-6, rtol=1e-6)


def test_rotary_kv_of_what_does_not_fit_raises_value_error() -> None:
    inputs = make_inputs(64, 64, torch.float32)
    q, k, v = inputs.heads()
    arguments = (q, k, v, inputs.rotation, inputs.kv, LAYER)
    with pytest.raises(ValueError, match=r"slot_mapping is \[7\] of torch.int32"):
        rotary_kv(*arguments, inputs.slots.int())
    with pytest.raises(ValueError, match="scales go with"):
        rotary_kv(*arguments, inputs.slots, torch.ones(2, NUM_LAYERS, NUM_KV_HEADS))
    with pytest.raises(ValueError, match=r"k is \[7, 2, 64\]"):
        rotary_kv(q, k[:, :2], *arguments[2:], inputs.slots)
