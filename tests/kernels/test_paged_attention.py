"""Paged attention against its plain definition. Whatever must not be read is NaN, and so is what must be written."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from kvern.kernels import cpu_threads
from kvern.kernels.paged_attention import (
    choose_backend,
    paged_attention,
    plan_attention,
    reference,
    write_kv,
)
from kvern.kernels.paged_attention.random_step import LAYER, RandomStep, make_step, run, run_reference

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        pytest.param([1], [1], id="first token"),
        pytest.param([63], [63], id="whole prompt"),
        pytest.param([123], [500], id="chunk of a longer context"),
        pytest.param([300], [333], id="chunk over several tiles"),
        pytest.param([1] * 9, [1, 15, 16, 17, 31, 32, 33, 100, 257], id="decodes of all lengths"),
        pytest.param([1, 7, 1, 130, 1, 2], [40, 7, 300, 150, 3, 64], id="decodes and chunks mixed"),
        pytest.param([1, 1, 3], [255, 1025, 514], id="decodes over splits, and a chunk"),
    ],
)
def test_attention_over_poisoned_pool_equals_reference(
    query_lens: list[int], context_lens: list[int], dtype: torch.dtype, backend: str
) -> None:
    expected = run_reference(make_step(query_lens, context_lens, dtype=dtype))
    assert_close(run(make_step(query_lens, context_lens, dtype=dtype), backend=backend), expected)


MIXED = ([1, 7, 1, 130, 1, 2, 40], [40, 7, 300, 150, 3, 64, 333])


def attend_pieces(
    whole: RandomStep,
    pieces: list[int],
    company: RandomStep | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend a sequence's queries in pieces, each a step of its own, beside another sequence or alone."""
    outs, done = [], 0
    for count in pieces:
        table, starts, lens = whole.block_table, [0, count], [done + count]
        q, k, v, slots, kv = (
            whole.q[done : done + count],
            whole.k[done : done + count],
            whole.v[done : done + count],
            whole.slot_mapping[done : done + count],
            whole.kv,
        )
        if company is not None:
            kv = torch.cat((whole.kv, company.kv))
            table = torch.zeros(2, max(whole.block_table.shape[1], company.block_table.shape[1]), dtype=torch.int32)
            table[0, : whole.block_table.shape[1]] = whole.block_table[0]
            table[1, : company.block_table.shape[1]] = company.block_table[0] + len(whole.kv)
            starts, lens = [*starts, count + len(company.q)], [*lens, int(company.context_lens[0])]
            q, k, v = torch.cat((q, company.q)), torch.cat((k, company.k)), torch.cat((v, company.v))
            slots = torch.cat((slots, company.slot_mapping + len(whole.kv) * kv.shape[4]))
        metadata = plan_attention(
            kv, table, torch.tensor(starts, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32), slots, (window,)
        )
        write_kv(kv, LAYER, k, v, metadata)
        attended = paged_attention(q, kv, LAYER, metadata, 0.125, sliding_window=window, softcap=softcap)
        outs.append(attended[:count])
        whole.kv.copy_(kv[: len(whole.kv)])
        done += count
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("pieces", [[300], [1] * 300, [7] * 42 + [6], [128, 1, 64, 107], [299, 1]])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (8, 1)])
def test_query_is_the_same_bits_however_its_sequence_is_cut(
    pieces: list[int], num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    """D17: whole, in chunks, token by token; alone and in company."""
    make = partial(make_step, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype)
    expected = attend_pieces(make([300], [300]), [300])
    assert torch.equal(attend_pieces(make([300], [300]), pieces), expected)
    assert torch.equal(attend_pieces(make([300], [300]), pieces, company=make([5], [411])), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "softcap"), [(300, None), (37, 0.5), (None, 2.0)])
def test_query_over_many_splits_is_the_same_bits_however_its_sequence_is_cut(
    window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    """D17: one query's splits are computed each for itself, those of a chunk one after the other."""
    make = partial(make_step, head_dim=80, block_size=5, dtype=dtype)
    pieces = [500, *[1] * 30, 99, 1]
    expected = attend_pieces(make([630], [630]), [630], window=window, softcap=softcap)
    company = make([1, 1], [900, 20])
    assert torch.equal(attend_pieces(make([630], [630]), pieces, company, window, softcap), expected)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_attention_on_any_number_of_threads_is_the_same_bits(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [1, 1, 70, 1], [1500, 30, 300, 260]
    with monkeypatch.context() as patched:
        patched.setattr(cpu_threads, "_parallel", lambda: cpu_threads._serial)
        expected = run(make_step(*lengths, dtype=torch.bfloat16))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(run(make_step(*lengths, dtype=torch.bfloat16)), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_attention_in_two_bytes_is_that_in_float32_rounded(head_dim: int, dtype: torch.dtype) -> None:
    """But for what lies next to a tie: a CPU may multiply bfloat16 in pairs."""
    step = make_step(*MIXED, head_dim=head_dim, dtype=dtype)
    wide = replace(step, **{name: getattr(step, name).float() for name in ("kv", "q", "k", "v")})
    in_float32 = run(wide)
    margin = in_float32.abs() * 2e-6 + 2e-6
    actual, below, above = run(step), in_float32 - margin, in_float32 + margin
    assert bool(((below.to(dtype) <= actual) & (actual <= above.to(dtype))).all())


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("sliding_window", [1, 16, 37, 1000])
def test_attention_within_a_window_equals_reference(sliding_window: int, softcap: float | None) -> None:
    """I10."""
    expected = run_reference(make_step(*MIXED), sliding_window, softcap)
    assert_close(run(make_step(*MIXED), sliding_window, softcap), expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_with_capped_scores_equals_reference(dtype: torch.dtype) -> None:
    expected = run_reference(make_step(*MIXED, dtype=dtype), softcap=0.5)
    assert_close(run(make_step(*MIXED, dtype=dtype), softcap=0.5), expected)


def test_blocks_behind_the_window_are_not_read() -> None:
    step = make_step([1, 20], [200, 100])
    metadata = step.plan(30)
    write_kv(step.kv, LAYER, step.k, step.v, metadata)
    expected = paged_attention(step.q, step.kv, LAYER, metadata, 0.125, sliding_window=30)
    step.kv[step.block_table[0, : (200 - 30) // 16]] = float("nan")
    step.kv[step.block_table[1, : (81 - 30) // 16]] = float("nan")
    actual = paged_attention(step.q, step.kv, LAYER, metadata, 0.125, sliding_window=30)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (8, 2), (5, 1)])
@pytest.mark.parametrize("head_dim", [8, 80])
@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_attention_on_odd_shapes_equals_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    expected = run_reference(make_step([1, 9, 1, 3], [33, 21, 7, 3], **shape))
    assert_close(run(make_step([1, 9, 1, 3], [33, 21, 7, 3], **shape)), expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [96, 128, 256])
@pytest.mark.parametrize(("sliding_window", "softcap"), [(None, None), (100, 0.5)])
def test_attention_in_heads_of_another_size_equals_reference(
    sliding_window: int | None, softcap: float | None, head_dim: int, dtype: torch.dtype
) -> None:
    make = partial(make_step, [1, 9, 1, 3], [333, 21, 7, 270], head_dim=head_dim, dtype=dtype)
    assert_close(run(make(), sliding_window, softcap), run_reference(make(), sliding_window, softcap))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "expected"),
    [
        (torch.float32, 5, "numba"),
        (torch.bfloat16, 64, "numba"),
        (torch.float16, 64, "numba"),
        (torch.bfloat16, 5, "torch"),
        (torch.float64, 64, "torch"),
        (torch.float8_e4m3fn, 64, "torch"),
    ],
)
def test_backend_on_a_cpu_is_the_compiled_one_for_what_it_can_read(
    dtype: torch.dtype, head_dim: int, expected: str
) -> None:
    kv = torch.zeros(1, 1, 2, 1, 16, head_dim, dtype=dtype)
    assert choose_backend(kv) == expected
    if expected == "torch":
        with pytest.raises(ValueError, match="heads of an even size"):
            choose_backend(kv, "numba")


def test_attention_of_what_is_no_whole_tensor_equals_reference() -> None:
    """Queries, keys and values are parts of one product."""
    step = make_step(*MIXED, dtype=torch.bfloat16)
    expected = run_reference(step)
    together = torch.cat((step.q, step.k, step.v), dim=1)
    step.q, step.k, step.v = together.split([9, 3, 3], dim=1)
    assert_close(run(step), expected)


def test_attention_over_layer_major_memory_equals_reference() -> None:
    expected = run_reference(make_step([1, 20, 1], [50, 30, 5]))
    assert_close(run(make_step([1, 20, 1], [50, 30, 5], layer_major=True)), expected)


def test_attention_of_a_crowd_larger_than_one_group_equals_reference() -> None:
    lengths = [150 + 3 * sequence for sequence in range(24)]
    expected = run_reference(make_step([1] * 24, lengths, num_kv_heads=9))
    assert_close(run(make_step([1] * 24, lengths, num_kv_heads=9)), expected)


def test_attention_beside_a_sequence_of_nan_leaves_the_others_whole() -> None:
    step = make_step([1, 1, 1], [20, 40, 30])
    expected = run_reference(step)
    step.kv[step.block_table[1, 0], LAYER] = float("nan")
    actual = run(step)
    assert actual[1].isnan().all()
    assert_close(actual[[0, 2]], expected[[0, 2]])


def test_write_kv_touches_its_layer_and_slots_only() -> None:
    step = make_step([3, 1], [19, 4])
    step.slot_mapping[1] = -1
    expected = step.kv.clone()
    reference.write_kv(expected, LAYER, step.k, step.v, step.slot_mapping)
    write_kv(step.kv, LAYER, step.k, step.v, step.plan())
    torch.testing.assert_close(step.kv, expected, rtol=0, atol=0, equal_nan=True)


def test_attention_with_nothing_to_write_reads_what_is_resident() -> None:
    """The last token of a wholly resident prompt runs with slot -1."""
    step = make_step([1], [32])
    expected = run_reference(step)
    step.slot_mapping[:] = -1
    step.k[:], step.v[:] = float("nan"), float("nan")
    assert_close(run(step), expected)


def test_attention_of_shapes_that_do_not_fit_raises_value_error() -> None:
    step = make_step([2], [5])
    metadata = step.plan()
    with pytest.raises(ValueError, match="8 query heads cannot share 3 KV heads"):
        paged_attention(step.q[:, :8], step.kv, LAYER, metadata, 0.125)
    with pytest.raises(ValueError, match=r"q is \[1, 9, 64\]"):
        paged_attention(step.q[:1], step.kv, LAYER, metadata, 0.125)
    with pytest.raises(ValueError, match=r"k is .*float64"):
        write_kv(step.kv, LAYER, step.k.double(), step.v, metadata)
    with pytest.raises(ValueError, match="not planned for a sliding window of 5"):
        paged_attention(step.q, step.kv, LAYER, metadata, 0.125, sliding_window=5)
    with pytest.raises(ValueError, match="at least one token is needed"):
        step.plan(0)
    with pytest.raises(ValueError, match="the step was planned for"):
        write_kv(step.kv[1:], LAYER, step.k, step.v, metadata)
    with pytest.raises(ValueError, match=r"context_lens is .*int64"):
        plan_attention(step.kv, step.block_table, step.cu_query_lens, step.context_lens.long(), step.slot_mapping)
    with pytest.raises(ValueError, match="must be as many"):
        plan_attention(step.kv, step.block_table[:0], step.cu_query_lens, step.context_lens, step.slot_mapping)
    with pytest.raises(ValueError, match="contiguous"):
        plan_attention(
            step.kv.transpose(-1, -2), step.block_table, step.cu_query_lens, step.context_lens, step.slot_mapping
        )
