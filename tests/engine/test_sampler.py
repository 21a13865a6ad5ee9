"""Sampling against plain references, one row and one token at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kvern.engine.sampler import RandomRows, Sample, _invert, sample

from .sampling_reference import draw

VOCAB_SIZE = 1009


def make_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> Tensor:
    """Logits with many equal ones, as bfloat16 products give."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    return logits.to(torch.bfloat16).float()


def random_rows(
    rows: list[int],
    *,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    seed: int | list[int] = 0,
    output_position: int | list[int] = 0,
    min_p: float = 0.0,
) -> RandomRows:
    def column(value: float | list[int] | list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(value if isinstance(value, list) else [value] * len(rows), dtype=dtype)

    return RandomRows(
        rows=torch.tensor(rows),
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int64),
        top_p=column(top_p, torch.float64),
        seed=column(seed, torch.int64),
        output_position=column(output_position, torch.int64),
        log_min_p=column(math.log(min_p) if min_p else -math.inf, torch.float32),
        has_min_p=min_p > 0,
        has_top_k=bool((column(top_k, torch.int64) > 0).any()),
        has_top_p=bool((column(top_p, torch.float64) < 1).any()),
    )


def draws(logits: Tensor, count: int, **params: int | float) -> list[int]:
    """Draw from one row of logits at `count` output positions."""
    random = random_rows(list(range(count)), output_position=list(range(count)), **params)  # type: ignore[arg-type]
    return sample(logits.expand(count, -1).contiguous(), random).token_ids.tolist()


def test_greedy_row_takes_the_greatest_logit_and_of_equal_ones_the_lowest_id() -> None:
    logits = make_logits(4)
    logits[1, [700, 3, 900]] = 50.0
    logits[2, :] = -1.5
    drawn = sample(logits, None)
    assert drawn.is_finite.all()
    assert drawn.is_allowed.all()
    assert drawn.token_ids.tolist() == [
        max(range(VOCAB_SIZE), key=lambda token, row=row: (row[token], -token)) for row in logits.tolist()
    ]
    assert drawn.token_ids[1:3].tolist() == [3, 0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 200, VOCAB_SIZE, VOCAB_SIZE + 1])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
def test_random_row_equals_reference(temperature: float, top_k: int, top_p: float) -> None:
    """D12: top_k of 0, of the vocabulary's size and above it change nothing."""
    logits = make_logits(12, seed=top_k)
    random = random_rows(
        list(range(12)),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=[7**number for number in range(12)],
        output_position=[3 * number for number in range(12)],
    )
    expected = [
        draw(
            row,
            sorted(range(VOCAB_SIZE), key=lambda token, row=row: (-row[token], token)),
            temperature=temperature,
            min_p=0.0,
            top_k=top_k,
            top_p=top_p,
            seed=7**number,
            position=3 * number,
        )
        for number, row in enumerate(logits.tolist())
    ]
    assert sample(logits, random).token_ids.tolist() == expected


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("size", [1.0, 1e34])
def test_lowest_temperatures_give_a_greatest_token(temperature: float, size: float) -> None:
    """D01: near-greedy, and no number overflows."""
    logits = make_logits(1) * size
    assert {float(logits[0, token]) for token in draws(logits, 200, temperature=temperature)} == {float(logits.max())}


def test_top_k_at_equal_logits_keeps_the_lowest_ids() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 500] = 1.0
    assert set(draws(logits, 500, top_k=4)) == {0, 1, 2, 500}


def test_top_p_at_equal_logits_keeps_the_lowest_ids() -> None:
    logits = torch.full((1, VOCAB_SIZE), float("-inf"))
    logits[0, [5, 10, 15, 20]] = 1.0
    assert set(draws(logits, 200, top_p=0.5)) == {5, 10}
    assert set(draws(logits, 200, top_p=0.51)) == {5, 10, 15}


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.tensor([[4.0, 4.0, 4.0, 4.0, 3.99, 3.98]])
    assert set(draws(logits, 300, top_k=2, top_p=0.6)) == {0, 1}
    assert set(draws(logits, 300, top_k=2, top_p=0.5)) == {0}


def test_negative_zero_and_zero_are_equal_logits() -> None:
    logits = torch.full((1, 8), float("-inf"))
    logits[0, [2, 4, 6]] = torch.tensor([-0.0, 0.0, 0.0])
    assert set(draws(logits, 100, top_k=2)) == {2, 4}


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 2), (0.624, 2), (0.625, 4), (1 - 2**-53, 4)])
def test_inversion_never_lands_on_a_token_without_weight(uniform: float, token: int) -> None:
    weights = torch.tensor([[0, 0, 5, 0, 3, 0]])
    assert _invert(weights, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_draws_have_the_distribution_of_the_softmax() -> None:
    """Chi-square over 20,000 draws from 20 tokens; 19 degrees of freedom exceed 43.8 once in a thousand."""
    logits = make_logits(1, vocab_size=20)
    count = 20_000
    expected = torch.softmax(logits[0].double() / 0.8, dim=-1) * count
    observed = torch.bincount(torch.tensor(draws(logits, count, temperature=0.8, seed=11)), minlength=20)
    assert float(((observed - expected) ** 2 / expected).sum()) < 43.8


def test_draw_from_all_tokens_equals_that_with_a_filter_that_leaves_all() -> None:
    """The first takes one pass over the logits, the second goes step by step."""
    vocab_size = 5000
    logits, rows = make_logits(40, vocab_size), list(range(40))
    params = {"temperature": [0.1 + row / 10 for row in rows], "seed": rows, "output_position": rows}
    step_by_step = random_rows(rows, top_k=vocab_size, **params)  # type: ignore[arg-type]
    in_one_pass = random_rows(rows, **params)  # type: ignore[arg-type]
    assert step_by_step.is_filtered
    assert not in_one_pass.is_filtered
    expected = sample(logits.clone(), step_by_step).token_ids
    assert torch.equal(sample(logits, in_one_pass).token_ids, expected)
    assert len(expected.unique()) > 20


def test_draws_of_other_seeds_and_positions_differ() -> None:
    logits = torch.zeros(1, 100_000)
    assert draws(logits, 8, seed=5) == draws(logits, 8, seed=5)
    assert len({*draws(logits, 8, seed=5), *draws(logits, 8, seed=5 + 2**40)}) == 16


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 49_152, 50_257])
def test_row_draws_the_same_alone_and_in_any_company(vocab_size: int) -> None:
    """D02, D17: neither other rows' filters nor greedy rows change anything."""
    logits = make_logits(7, vocab_size) * 0.01
    params = {
        "temperature": [0.5, 1.0, 1.7, 1.0, 0.9],
        "top_k": [0, 50, 0, 0, 900],
        "top_p": [1.0, 1.0, 0.9, 1.0, 0.99],
        "seed": [1, 2, 3, 4, 5],
        "output_position": [10, 20, 30, 40, 50],
    }
    rows = [0, 2, 3, 5, 6]
    together = sample(logits, random_rows(rows, **params)).token_ids  # type: ignore[arg-type]
    for index, row in enumerate(rows):
        one = {name: values[index] for name, values in params.items()}
        alone = sample(logits[row : row + 1], random_rows([0], **one)).token_ids  # type: ignore[arg-type]
        assert together[row] == alone[0]
    assert together[[1, 4]].tolist() == sample(logits, None).token_ids[[1, 4]].tolist()


def assert_second_row_failed_alone(drawn: Sample, expected: list[int]) -> None:
    assert drawn.is_finite.tolist() == [True, False, True]
    assert drawn.token_ids[[0, 2]].tolist() == [expected[0], expected[2]]
    assert 0 <= drawn.token_ids[1] < VOCAB_SIZE


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_fail_their_row_alone(poison: float) -> None:
    """D18: an error, not a token."""
    logits = make_logits(3)
    random = random_rows([0, 1, 2], temperature=0.9, top_k=20, top_p=0.9, seed=[1, 2, 3])
    greedy, drawn = sample(logits, None).token_ids.tolist(), sample(logits, random).token_ids.tolist()
    logits[1, 300] = poison
    assert_second_row_failed_alone(sample(logits, None), greedy)
    assert_second_row_failed_alone(sample(logits, random), drawn)


def test_logits_that_are_all_minus_infinity_fail_their_row_alone() -> None:
    logits = make_logits(3)
    greedy = sample(logits, None).token_ids.tolist()
    logits[1, :] = float("-inf")
    assert_second_row_failed_alone(sample(logits, None), greedy)
