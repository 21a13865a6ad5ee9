"""Paged attention's Triton kernels against the plain definition, under the interpreter.

Whatever must not be read is NaN, and so is what must be written. bfloat16 is tested as storage: the kernels compute in
float32 here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kvern.kernels.paged_attention import (
    AttentionMetadata,
    allocate_split_lists,
    paged_attention,
    plan_attention,
    reference,
    triton_backend,
    write_kv,
)
from kvern.kernels.paged_attention.configurations import SPLIT
from tests.kernels.test_paged_attention import LAYER, NUM_LAYERS, Step, make_step, run_reference
from tests.kernels.triton.poison import poisoned_outputs

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned_outputs():
        yield


def plan(step: Step, *windows: int | None, **options) -> AttentionMetadata:
    return plan_attention(
        step.kv,
        step.block_table,
        step.cu_query_lens,
        step.context_lens,
        step.slot_mapping,
        windows or (None,),
        backend="triton",
        **options,
    )


def run(step: Step, window: int | None = None, softcap: float | None = None, **options) -> Tensor:
    metadata = plan(step, None, window, **options)
    write_kv(step.kv, LAYER, step.k, step.v, metadata)
    return paged_attention(step.q, step.kv, LAYER, metadata, 0.125, sliding_window=window, softcap=softcap)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        pytest.param([1, 1, 1, 1, 1], [1, 63, 123, 257, SPLIT + 1], id="decodes"),
        pytest.param([63, 123], [63, 130], id="chunks"),
        pytest.param([1, 7, 1, 2], [40, 7, 300, 64], id="mixed"),
    ],
)
def test_attention_over_poisoned_pool_equals_reference(
    query_lens: list[int], context_lens: list[int], dtype: torch.dtype
) -> None:
    shape = {"num_heads": 4, "num_kv_heads": 1, "dtype": dtype}
    expected = run_reference(make_step(query_lens, context_lens, **shape))
    assert_close(run(make_step(query_lens, context_lens, **shape)), expected)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(2, 2, 8, 5), (8, 2, 80, 16), (8, 1, 128, 32), (5, 1, 64, 1), (9, 3, 64, 16), (40, 1, 8, 16)],
)
def test_attention_on_odd_shapes_equals_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    expected = run_reference(make_step([1, 9, 1, 3], [33, 21, 7, 3], **shape))
    assert_close(run(make_step([1, 9, 1, 3], [33, 21, 7, 3], **shape)), expected)


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (16, 0.5), (37, None), (1000, 0.5)])
def test_attention_within_a_window_equals_reference(window: int, softcap: float | None) -> None:
    """I10."""
    lengths = ([1, 7, 1, 40], [40, 7, 550, 150])
    shape = {"num_heads": 4, "num_kv_heads": 1}
    expected = run_reference(make_step(*lengths, **shape), window, softcap)
    assert_close(run(make_step(*lengths, **shape), window, softcap), expected)


def test_attention_with_capped_scores_equals_reference() -> None:
    expected = run_reference(make_step([1, 20], [40, 30]), softcap=0.5)
    assert_close(run(make_step([1, 20], [40, 30]), softcap=0.5), expected)


def test_blocks_behind_the_window_are_not_read() -> None:
    step = make_step([1, 20], [1200, 100], num_heads=2, num_kv_heads=1)
    expected = run(step, 30)
    step.kv[step.block_table[0, : (1200 - 30) // 16]] = float("nan")
    step.kv[step.block_table[1, : (81 - 30) // 16]] = float("nan")
    assert torch.equal(run(step, 30), expected)


def test_attention_over_layer_major_memory_equals_reference() -> None:
    expected = run_reference(make_step([1, 20, 1], [50, 30, 5]))
    assert_close(run(make_step([1, 20, 1], [50, 30, 5], layer_major=True)), expected)


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")
def test_attention_beside_a_sequence_of_nan_leaves_the_others_whole() -> None:
    step = make_step([1, 1, 1, 4], [20, 40, 30, 9])
    expected = run_reference(step)
    step.kv[step.block_table[1, 0], LAYER] = float("nan")
    actual = run(step)
    assert actual[1].isnan().all()
    assert_close(actual[[0, *range(2, 7)]], expected[[0, *range(2, 7)]])


@pytest.mark.parametrize("shape", [{"num_heads": 4, "num_kv_heads": 1}, {"dtype": torch.bfloat16}], ids=str)
def test_sequence_in_company_gets_the_same_bits_as_alone(shape: dict) -> None:
    """D17: decodes of several splits, and chunks, each with another company."""
    query_lens, context_lens = [1, 1, 30, 5], [1100, 3, 90, 5]
    crowd = make_step(query_lens, context_lens, **shape)
    together = run(crowd)
    for row, (count, length) in enumerate(zip(query_lens, context_lens, strict=True)):
        begin, end = crowd.cu_query_lens[row : row + 2].tolist()
        alone = plan_attention(
            crowd.kv,
            crowd.block_table[row : row + 1],
            torch.tensor([0, count], dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32),
            crowd.slot_mapping[begin:end],
            backend="triton",
        )
        attended = paged_attention(crowd.q[begin:end], crowd.kv, LAYER, alone, 0.125)
        assert torch.equal(attended, together[begin:end])


@pytest.mark.parametrize(
    ("pieces", "window"), [([30, 70, 100], None), ([30, 70, 100], 50), ([2] * 3 + [194], None), ([199, 1], None)]
)
def test_chunks_of_a_prompt_get_the_same_bits_as_the_whole(pieces: list[int], window: int | None) -> None:
    """A chunk of one token takes the path of decodes, and is equal but for rounding."""
    step = make_step([200], [200], num_heads=4, num_kv_heads=2)
    whole = run(step, window)
    done = 0
    for count in pieces:
        chunk = slice(done, done + count)
        done += count
        metadata = plan_attention(
            step.kv,
            step.block_table,
            torch.tensor([0, count], dtype=torch.int32),
            torch.tensor([done], dtype=torch.int32),
            step.slot_mapping[chunk],
            (window,),
            backend="triton",
        )
        attended = paged_attention(step.q[chunk], step.kv, LAYER, metadata, 0.125, sliding_window=window)
        if count == 1:
            torch.testing.assert_close(attended, whole[chunk], atol=2e-6, rtol=2e-6)
        else:
            assert torch.equal(attended, whole[chunk])


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
    planned = plan(step, None, 2)
    assert isinstance(planned.plan, triton_backend.Plan)
    whole, near = planned.plan.split_lists[None], planned.plan.split_lists[2]
    assert whole.starts.tolist() == [0, 1, 5, 5, 5, 7]
    assert whole.items[:7].tolist() == [[0, 0], [1, 0], [1, 1], [1, 2], [1, 3], [4, 0], [4, 1]]
    assert near.starts.tolist() == [0, 1, 3, 3, 3, 5]
    assert near.items[:5].tolist() == [[0, 0], [1, 2], [1, 3], [4, 0], [4, 1]]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("query_lens", "context_lens"), [([1, 1], [63, 600]), ([9, 1], [70, 20])])
def test_attention_over_fp8_equals_reference_over_what_it_holds(
    query_lens: list[int], context_lens: list[int], softcap: float | None
) -> None:
    """Each layer and head has its scales; a value too large for fp8 is held to the largest."""
    step = make_step(query_lens, context_lens, num_heads=4, num_kv_heads=2, dtype=torch.float16)
    scales = torch.rand(2, NUM_LAYERS, 2) * 0.02 + 0.005
    step.k[0, 0, 0], step.v[0, 1, 3] = 100.0, -100.0
    factors = scales.transpose(0, 1)[..., None, None]
    step.kv = (step.kv.float() / factors).clamp(-448, 448).to(torch.float8_e4m3fn)
    attended = run(step, softcap=softcap, kv_scales=scales)
    step.kv = step.kv.float() * factors
    expected = reference.paged_attention(
        step.q,
        step.kv,
        LAYER,
        step.block_table,
        step.cu_query_lens,
        step.context_lens,
        0.125,
        None,
        softcap,
    )
    assert_close(attended, expected)
    block, offset = divmod(int(step.slot_mapping[0]), 16)
    assert step.kv[block, LAYER, 0, 0, offset, 0] == pytest.approx(448 * float(scales[0, LAYER, 0]))
    assert step.kv[block, LAYER, 1, 1, offset, 3] == pytest.approx(-448 * float(scales[1, LAYER, 1]))


def test_blocks_of_a_large_pool_are_addressed_past_two_to_the_31() -> None:
    """8B strides: 32 layers, 8 KV heads of 128, blocks of 16. Memory that is not touched is not committed."""
    small = make_step([1, 3], [40, 20], num_heads=8, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    block_elements = 32 * 2 * 8 * 16 * 128
    needed = len(small.kv)
    storage = torch.UntypedStorage(2 * block_elements * (4096 + needed))
    kv = torch.tensor([], dtype=torch.bfloat16).set_(storage).view(-1, 32, 2, 8, 16, 128)
    kv[4096:, LAYER] = small.kv[:, LAYER]
    expected = run_reference(small)
    small.kv, small.slot_mapping = kv, small.slot_mapping + 4096 * 16
    small.block_table = torch.where(small.block_table < needed, small.block_table + 4096, small.block_table)
    assert_close(run(small), expected)


def test_what_the_kernels_do_not_take_raises_value_error() -> None:
    step = make_step([1, 1], [5, 5])
    with pytest.raises(ValueError, match="one for each"):
        plan(make_step([2], [5]), max_query_len=1)
    with pytest.raises(ValueError, match="do not fit"):
        plan(step, split_lists=allocate_split_lists(torch.device("cpu"), 1, 2048))
    with pytest.raises(ValueError, match="scales are for float8"):
        plan(step, kv_scales=torch.ones(2, NUM_LAYERS, 3))
    step.kv = step.kv.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"kv_scales is \[2, 3, 2\]"):
        plan(step, kv_scales=torch.ones(2, NUM_LAYERS, 2))
    step = make_step([1], [5])
    step.q = step.q.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous in q"):
        run(step)
    with pytest.raises(ValueError, match="head size of 512"):
        run(make_step([1], [5], num_heads=1, num_kv_heads=1, head_dim=512))
