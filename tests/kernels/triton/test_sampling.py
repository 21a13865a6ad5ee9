"""Sampling kernels against their definition, and against the engine's sampler: the same tokens, to the last one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvern.engine.sampler import RandomRows, sample
from kvern.kernels.sampling import (
    DrawParams,
    LogitBias,
    Penalties,
    TokenMask,
    count_tokens,
    draw,
    edit_logits,
    reference,
)

from .poison import poisoned_outputs

FILTERS: dict[str, dict[str, float]] = {
    "none": {},
    "greedy": {"temperature": 0.0},
    "min_p": {"min_p": 0.02},
    "top_k 1": {"top_k": 1},
    "top_k 50": {"top_k": 50},
    "top_k 100,000": {"top_k": 100_000},
    "top_p 0.9": {"top_p": 0.9},
    "top_p 0.3": {"top_p": 0.3},
    "top_p 1e-6": {"top_p": 1e-6},
    "top_k 120, top_p 0.8": {"top_k": 120, "top_p": 0.8},
    "top_k 120, top_p 0.9999": {"top_k": 120, "top_p": 0.9999},
    "all": {"temperature": 1.7, "min_p": 0.001, "top_k": 500, "top_p": 0.95},
    "cold": {"temperature": 1e-5, "top_p": 0.5},
    "hot": {"temperature": 100.0, "top_p": 0.99},
}


def make_logits(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Logits with many equal ones, as bfloat16 products give, and some tokens out."""
    generator = torch.Generator().manual_seed(seed * 1000 + vocab_size)
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(torch.bfloat16).float()
    is_out = torch.rand(logits.shape, generator=generator) < 0.1
    is_out[:, vocab_size // 2] = False
    return logits.masked_fill(is_out, float("-inf"))


def make_params(filters: list[dict[str, float]], seed: int = 0) -> DrawParams:
    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([row.get(name, default) for row in filters], dtype=dtype)

    min_p = [row.get("min_p", 0.0) for row in filters]
    return DrawParams(
        temperature=column("temperature", 1.0, torch.float32),
        log_min_p=torch.tensor([math.log(each) if each else -math.inf for each in min_p]),
        top_k=column("top_k", 0, torch.int64),
        top_p=column("top_p", 1.0, torch.float64),
        seed=torch.tensor([(7**number * 1_000_003 + seed) % 2**63 - 2**62 for number in range(len(filters))]),
    )


def sampled_by_the_engine(logits: Tensor, slots: Tensor, positions: Tensor, params: DrawParams) -> Tensor:
    rows = (params.temperature[slots] >= 1e-5).nonzero().flatten()
    chosen = slots[rows]
    random = RandomRows(
        rows=rows,
        temperature=params.temperature[chosen],
        log_min_p=params.log_min_p[chosen],
        top_k=params.top_k[chosen],
        top_p=params.top_p[chosen],
        seed=params.seed[chosen],
        output_position=positions[rows],
        has_min_p=True,
        has_top_k=True,
        has_top_p=True,
    )
    return sample(logits.clone(), random).token_ids


def drawn(*arguments: Any) -> list[int]:
    with poisoned_outputs():
        token_ids, is_allowed = draw(*arguments)
    assert is_allowed.all()
    return token_ids.tolist()


@pytest.mark.parametrize("vocab_size", [123, 5003])
def test_draws_equal_reference_and_engine(vocab_size: int) -> None:
    """Rows of all kinds in one batch, slots in another order than rows."""
    params = make_params(list(FILTERS.values()))
    slots = torch.randperm(len(FILTERS), generator=torch.Generator().manual_seed(1))
    logits, positions = make_logits(len(FILTERS), vocab_size), 3 * torch.arange(len(FILTERS))
    actual = drawn(logits.clone(), slots, positions, params)
    assert actual == reference.draw(logits, slots, positions, params)
    assert actual == sampled_by_the_engine(logits, slots, positions, params).tolist()


@pytest.mark.parametrize("name", [name for name in FILTERS if name != "greedy"])
def test_draws_at_many_positions_equal_the_engine(name: str) -> None:
    params, slots = make_params([FILTERS[name]]), torch.zeros(3, dtype=torch.int64)
    logits, positions = make_logits(1, 1001, seed=5).expand(3, -1).contiguous(), torch.arange(3)
    assert (
        drawn(logits.clone(), slots, positions, params)
        == sampled_by_the_engine(logits, slots, positions, params).tolist()
    )


def test_only_token_of_a_vocabulary_is_drawn() -> None:
    slots = torch.arange(2)
    assert drawn(torch.zeros(2, 1), slots, slots, make_params([{"top_k": 1, "top_p": 0.9}, {}])) == [0, 0]


def test_draw_from_a_large_vocabulary_equals_the_engine() -> None:
    """Many tiles, more than are a power of two; near-equal logits, so that hundreds of thousands are candidates."""
    filters = [{"top_k": 64, "top_p": 0.9}, {"top_p": 0.7}, {}]
    logits = make_logits(3, 49_157) * 0.01
    slots, positions, params = torch.arange(3), torch.tensor([5, 6, 7]), make_params(filters)
    actual = drawn(logits.clone(), slots, positions, params)
    assert actual == sampled_by_the_engine(logits, slots, positions, params).tolist()


@pytest.mark.parametrize("top_p", [1.0, 0.5, 0.51])
def test_of_equal_logits_the_lowest_ids_are_kept(top_p: float) -> None:
    """At the edge of top_k and of top_p, over a border of tiles; -0.0 and 0.0 are equal."""
    logits = torch.full((8, 5003), float("-inf"))
    logits[:, [5, 4095, 4096, 5000]] = torch.tensor([0.0, -0.0, 0.0, 0.0])
    slots, positions = torch.zeros(8, dtype=torch.int64), torch.arange(8)
    expected = {1.0: {5, 4095, 4096, 5000}, 0.5: {5, 4095}, 0.51: {5, 4095, 4096}}[top_p]
    assert set(drawn(logits.clone(), slots, positions, make_params([{"top_p": top_p}]))) == expected
    cut = make_params([{"top_k": len(expected), "top_p": 1.0}])
    assert set(drawn(logits.clone(), slots, positions, cut)) == expected
    assert drawn(logits[:1].clone(), slots[:1], positions[:1], make_params([{"temperature": 0.0}])) == [5]


def test_row_draws_the_same_alone_and_in_any_company() -> None:
    params, slots, positions = make_params(list(FILTERS.values())), torch.tensor([4, 6, 11, 0]), torch.arange(4)
    logits = make_logits(4, 1001, seed=2)
    together = drawn(logits.clone(), slots, positions, params)
    for row in range(4):
        one = slice(row, row + 1)
        assert drawn(logits[one].clone(), slots[one], positions[one], params) == together[one]


def test_rows_that_fill_up_a_batch_are_not_looked_at() -> None:
    logits, slots = make_logits(3, 123), torch.tensor([-1, 0, -1])
    logits[0], logits[2] = float("nan"), float("-inf")
    with poisoned_outputs():
        edited = edit_logits(logits, slots)
    assert edited.is_finite.tolist() == [True, True, True]
    assert logits[0].isnan().all()
    actual = drawn(logits, slots, torch.arange(3), make_params([{"top_p": 0.9}]))
    assert actual == [0, *drawn(logits[1:2], slots[1:2], torch.tensor([1]), make_params([{"top_p": 0.9}])), 0]


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), None])
@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {"top_k": 20, "top_p": 0.9}])
def test_logits_that_are_no_numbers_fail_their_row_alone(filters: dict[str, float], poison: float | None) -> None:
    """D18: an error, not a token. None: all of the row is -inf."""
    logits, slots, positions = make_logits(3, 5003), torch.zeros(3, dtype=torch.int64), torch.arange(3)
    params = make_params([filters])
    expected = drawn(logits.clone(), slots, positions, params)
    if poison is None:
        logits[1] = float("-inf")
    else:
        logits[1, 4500] = poison
    edited = edit_logits(logits, slots)
    assert edited.is_finite.tolist() == [True, False, True]
    token_ids, _ = draw(edited.logits, slots, positions, params)
    assert token_ids[[0, 2]].tolist() == [expected[0], expected[2]]
    assert 0 <= token_ids[1] < 5003


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_row_that_nothing_is_left_of_is_told() -> None:
    logits, slots = make_logits(2, 123), torch.zeros(2, dtype=torch.int64)
    mask = TokenMask(torch.tensor([-1, 0]), torch.zeros(1, 4, dtype=torch.int32))
    edited = edit_logits(logits, slots, mask)
    _, is_allowed = draw(edited.logits, slots, torch.arange(2), make_params([{"top_p": 0.9}]))
    assert edited.is_finite.tolist() == [True, True]
    assert is_allowed.tolist() == [True, False]


class Edits:
    """One of each kind for some of 5 rows, one of which fills up the batch."""

    def __init__(self, vocab_size: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(vocab_size)

        def chosen(share: float, num_rows: int) -> Tensor:
            return torch.rand(num_rows, vocab_size, generator=generator) < share

        self.logits = make_logits(5, vocab_size).to(dtype)
        self.slots = torch.tensor([2, 0, -1, 1, 3])
        bits = torch.randint(-(2**31), 2**31, (2, -(-vocab_size // 32)), generator=generator)
        self.mask = TokenMask(torch.tensor([1, -1, 0, -1, 0]), bits.to(torch.int32))
        addends = torch.randn(2, vocab_size, generator=generator).masked_fill(chosen(0.1, 2), float("-inf"))
        self.bias = LogitBias(torch.tensor([-1, 0, 0, 1, -1]), addends)
        self.penalties = Penalties(
            torch.tensor([2, -1, 0, 1, 0]),
            torch.tensor([[1.3, 0.0, 0.0], [1.0, 0.7, -0.4], [0.9, 0.1, 0.3]]),
            chosen(0.3, 3),
            torch.randint(0, 4, (3, vocab_size), generator=generator).mul(chosen(0.3, 3)).to(torch.int32),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [123, 5003])
def test_edited_logits_equal_reference_to_the_bit(vocab_size: int, dtype: torch.dtype) -> None:
    edits = Edits(vocab_size, dtype)
    edits.logits[1, 7] = 3e38 if dtype is not torch.float16 else 6e4
    arguments = (edits.logits.clone(), edits.slots, edits.mask, edits.bias, edits.penalties)
    expected, is_finite = reference.edit_logits(*arguments)
    with poisoned_outputs():
        actual = edit_logits(*arguments)
    in_use = edits.slots >= 0
    assert actual.logits.dtype is torch.float32
    assert torch.equal(actual.logits[in_use], expected[in_use])
    assert actual.is_finite.tolist() == is_finite


def test_tokens_are_counted_in_the_rows_that_are_penalized() -> None:
    edits = Edits(123, torch.float32)
    expected = edits.penalties.output_counts.clone()
    for row, token in ((2, 7), (0, 9), (1, 122)):
        expected[row, token] += 1
    index = torch.tensor([2, -1, 0, 1, -1])
    penalties = Penalties(index, edits.penalties.params, edits.penalties.in_prompt, edits.penalties.output_counts)
    count_tokens(penalties, torch.tensor([7, 8, 9, 122, 0]))
    assert torch.equal(edits.penalties.output_counts, expected)


def test_what_does_not_fit_raises_value_error() -> None:
    logits, params = make_logits(2, 123), make_params([{}])
    with pytest.raises(ValueError, match=r"slots: \[3\]"):
        draw(logits, torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), params)
    with pytest.raises(ValueError, match=r"logits are \[2, 123\] of torch.bfloat16"):
        draw(logits.bfloat16(), *(torch.zeros(2, dtype=torch.int64),) * 2, params)
    index = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"bias addends: \[1, 122\]"):
        edit_logits(logits, index, bias=LogitBias(index, torch.zeros(1, 122)))
