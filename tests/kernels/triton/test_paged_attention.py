"""Paged attention's Triton kernels against the plain definition, under the interpreter.

Whatever must not be read is NaN, and so is what must be written. bfloat16 is tested as storage: the kernels compute in
float32 here.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvern.kernels.check import Check, poisoned_outputs
from kvern.kernels.paged_attention import allocate_split_lists, random_step, triton_backend
from kvern.kernels.paged_attention.checks import TOLERANCE, checks
from kvern.kernels.paged_attention.configurations import SPLIT
from kvern.kernels.paged_attention.random_step import LAYER, NUM_LAYERS, RandomStep, make_step, run_reference


def run(step: RandomStep, window: int | None = None, softcap: float | None = None, **options) -> Tensor:
    with poisoned_outputs():
        return random_step.run(step, window, softcap, backend="triton", **options)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("check", list(checks()), ids=lambda check: check.name)
def test_attention_equals_reference(check: Check) -> None:
    check.run(torch.device("cpu"))


def test_blocks_behind_the_window_are_not_read() -> None:
    step = make_step([1, 20], [1200, 100], num_heads=2, num_kv_heads=1)
    expected = run(step, 30)
    step.kv[step.block_table[0, : (1200 - 30) // 16]] = float("nan")
    step.kv[step.block_table[1, : (81 - 30) // 16]] = float("nan")
    assert torch.equal(run(step, 30), expected)


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")
def test_attention_beside_a_sequence_of_nan_leaves_the_others_whole() -> None:
    step = make_step([1, 1, 1, 4], [20, 40, 30, 9])
    expected = run_reference(step)
    step.kv[step.block_table[1, 0], LAYER] = float("nan")
    actual = run(step)
    assert actual[1].isnan().all()
    assert_close(actual[[0, *range(2, 7)]], expected[[0, *range(2, 7)]])


def test_rows_of_padding_get_zeros_and_write_nothing() -> None:
    """Rows of length 0 with one token each, and of two tokens."""
    step = make_step([1, 1, 2, 1], [20, 30, 7, 600], num_heads=4, num_kv_heads=1)
    expected = run_reference(step)
    step.context_lens[1:3] = 0
    step.block_table[1:3] = 2**31 - 1
    step.slot_mapping[1:4] = -1
    before = step.kv.clone()
    attended = run(step)
    assert (attended[1:4] == 0).all()
    assert_close(attended[[0, 4]], expected[[0, 4]])
    assert torch.equal(step.kv.nan_to_num(), before.nan_to_num())


def test_tokens_of_no_sequence_get_zeros() -> None:
    step = make_step([1, 3], [20, 30])
    expected = run_reference(step)
    step.q, step.k, step.v = (torch.cat((each, each[:2])) for each in (step.q, step.k, step.v))
    step.slot_mapping = torch.cat((step.slot_mapping, torch.tensor([-1, -1])))
    attended = run(step)
    assert_close(attended[:4], expected)
    assert (attended[4:] == 0).all()


def test_step_of_decodes_alone_launches_no_kernel_for_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step([1, 1], [20, 600], num_heads=4, num_kv_heads=1)
    expected = run_reference(step)
    monkeypatch.setattr(triton_backend, "prefill_kernel", None)
    assert_close(run(step, max_query_len=1), expected)


def test_split_lists_of_an_earlier_step_serve_the_next() -> None:
    """One allocation for all steps, larger than each: what a CUDA graph reads lies where it lay."""
    lists = allocate_split_lists(torch.device("cpu"), 6, 2048, (None, 100))
    for lengths in ([1300, 3, 700], [9], [600, 2, 2, 2, 2, 1025]):
        step = make_step([1] * len(lengths), lengths, num_heads=4, num_kv_heads=1)
        expected = run_reference(step, 100)
        assert_close(run(step, 100, split_lists=lists), expected)


def test_list_of_splits_names_every_split_within_the_window_once() -> None:
    step = make_step([1, 1, 5, 1, 1], [SPLIT, 3 * SPLIT + 1, 9, 1, SPLIT + 1], num_heads=1, num_kv_heads=1)
    step.context_lens[3] = 0
    with poisoned_outputs():
        planned = step.plan(None, 2, backend="triton")
    assert isinstance(planned.plan, triton_backend.Plan)
    whole, near = planned.plan.split_lists[None], planned.plan.split_lists[2]
    assert whole.starts.tolist() == [0, 1, 5, 5, 5, 7]
    assert whole.items[:7].tolist() == [[0, 0], [1, 0], [1, 1], [1, 2], [1, 3], [4, 0], [4, 1]]
    assert near.starts.tolist() == [0, 1, 3, 3, 3, 5]
    assert near.items[:5].tolist() == [[0, 0], [1, 2], [1, 3], [4, 0], [4, 1]]


def test_what_the_kernels_do_not_take_raises_value_error() -> None:
    step = make_step([1, 1], [5, 5])
    with pytest.raises(ValueError, match="one for each"):
        make_step([2], [5]).plan(backend="triton", max_query_len=1)
    with pytest.raises(ValueError, match="do not fit"):
        step.plan(backend="triton", split_lists=allocate_split_lists(torch.device("cpu"), 1, 2048))
    with pytest.raises(ValueError, match="scales are for float8"):
        step.plan(backend="triton", kv_scales=torch.ones(2, NUM_LAYERS, 3))
    step.kv = step.kv.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"kv_scales is \[2, 3, 2\]"):
        step.plan(backend="triton", kv_scales=torch.ones(2, NUM_LAYERS, 2))
    step = make_step([1], [5])
    step.q = step.q.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous in q"):
        run(step)
    with pytest.raises(ValueError, match="head size of 512"):
        run(make_step([1], [5], num_heads=1, num_kv_heads=1, head_dim=512))
