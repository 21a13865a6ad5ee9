"""Attention over KV in fp8 on a CPU, against the plain definition on the same KV."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvern.kernels.paged_attention import paged_attention, reference, write_kv
from kvern.kernels.paged_attention.random_step import LAYER, NUM_LAYERS, RandomStep, make_step

from .test_paged_attention import MIXED, TOLERANCE

FP8 = torch.float8_e4m3fn
SCALES = torch.rand(2, NUM_LAYERS, 3, generator=torch.Generator().manual_seed(7)) * 0.02 + 0.005
FACTORS = SCALES.transpose(0, 1)[:, :, :, None, None]


def fp8_step(
    dtype: torch.dtype, query_lens: list[int], context_lens: list[int], layer_major: bool = False
) -> RandomStep:
    """The pool holds the step's KV over its scales, and NaN elsewhere."""
    step = make_step(query_lens, context_lens, dtype=dtype, layer_major=layer_major)
    step.kv = (step.kv.float() / FACTORS).to(FP8)
    return step


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("window", "softcap", "layer_major"), [(None, None, False), (20, 5.0, True)])
def test_attention_over_fp8_equals_reference_on_the_same_numbers(
    window: int | None, softcap: float | None, layer_major: bool, dtype: torch.dtype
) -> None:
    step = fp8_step(dtype, *MIXED, layer_major=layer_major)
    metadata = step.plan(window, kv_scales=SCALES)
    write_kv(step.kv, LAYER, step.k, step.v, metadata)
    attended = paged_attention(step.q, step.kv, LAYER, metadata, 0.125, sliding_window=window, softcap=softcap)
    whole = step.kv.float() * FACTORS
    lens = step.cu_query_lens, step.context_lens
    expected = reference.paged_attention(step.q, whole, LAYER, step.block_table, *lens, 0.125, window, softcap)
    assert attended.dtype is dtype
    torch.testing.assert_close(attended.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_written_kv_is_divided_by_its_scale_and_held_to_what_fp8_can() -> None:
    step = fp8_step(torch.bfloat16, [3], [40])
    step.k[1, 0, 0], step.v[1, 2, 3] = 1e4, -1e4
    write_kv(step.kv, LAYER, step.k, step.v, step.plan(kv_scales=SCALES))
    block, offset = divmod(int(step.slot_mapping[1]), 16)
    written = step.kv[block, LAYER, :, :, offset].float() * SCALES[:, LAYER, :, None]
    assert written[0, 0, 0] == pytest.approx(448 * float(SCALES[0, LAYER, 0]))
    assert written[1, 2, 3] == pytest.approx(-448 * float(SCALES[1, LAYER, 2]))
    torch.testing.assert_close(written[0, 1], step.k[1, 1].float(), atol=SCALES.max() / 512, rtol=1 / 16)


@pytest.mark.parametrize("scales", [None, SCALES[:, :2], SCALES.double()], ids=["none", "shape", "type"])
def test_scales_that_do_not_fit_are_refused(scales: Tensor | None) -> None:
    with pytest.raises(ValueError, match="scales"):
        fp8_step(torch.float32, [1], [5]).plan(kv_scales=scales)


def test_scales_for_other_kv_are_refused() -> None:
    with pytest.raises(ValueError, match="scales are for float8"):
        make_step([1], [5]).plan(kv_scales=SCALES)
