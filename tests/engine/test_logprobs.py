"""Log-probabilities, ranks and alternatives against plain sorting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvern.engine.logprobs import gather_logprobs

VOCAB_SIZE = 501


def make_logits(num_rows: int) -> Tensor:
    """Logits with many equal ones, the greatest among them."""
    logits = (torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 2).round() / 2
    logits[0] = 0.0
    logits[1, 5:] = -torch.inf
    return logits


def ordered(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


@pytest.mark.parametrize("num_top", [1, 4, 10, VOCAB_SIZE, VOCAB_SIZE + 9])
def test_alternatives_and_ranks_are_in_order_and_the_lowest_of_equal_ids_first(num_top: int) -> None:
    """D16."""
    logits = make_logits(6)
    token_ids = torch.tensor([7, 3, 500, 0, 250, 77])
    told = gather_logprobs(logits, token_ids, [num_top] * 6).on_host([num_top] * 6)
    expected = torch.log_softmax(logits, dim=-1)
    for row, (each, token_id) in enumerate(zip(told, token_ids.tolist(), strict=True)):
        order = ordered(logits[row].tolist())
        assert each.rank == order.index(token_id) + 1
        assert each.logprob == expected[row, token_id]
        assert each.top_ids == order[:num_top]
        assert each.top_logprobs == expected[row, order[:num_top]].tolist()


def test_rows_that_want_no_alternatives_get_none_and_others_theirs() -> None:
    """D15: 0 gives the sampled token's value alone."""
    logits = make_logits(5)
    num_top = [10, 4, 1, 0, 0]
    told = gather_logprobs(logits, torch.arange(5), num_top).on_host(num_top)
    assert [len(each.top_ids) for each in told] == num_top
    assert told[1].top_ids == ordered(logits[1].tolist())[:4]
    assert gather_logprobs(logits, torch.arange(5), [0] * 5).top_ids.shape == (0, 0)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_numbers_of_a_row_are_bitwise_the_same_alone_and_in_company(num_threads: int) -> None:
    """D17."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        logits = torch.randn(9, 50_257, generator=torch.Generator().manual_seed(1))
        token_ids = torch.arange(9) * 1000
        together = gather_logprobs(logits, token_ids, [3] * 9).on_host([3] * 9)
        for row in range(9):
            alone = gather_logprobs(logits[row : row + 1], token_ids[row : row + 1], [0]).on_host([0])
            assert alone[0].logprob == together[row].logprob
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_row_of_no_numbers_gives_nan_and_leaves_others_alone(poison: float) -> None:
    logits = make_logits(4)
    expected = gather_logprobs(logits, torch.arange(4), [5] * 4).on_host([5] * 4)
    logits[2, 40] = poison
    told = gather_logprobs(logits, torch.arange(4), [5] * 4).on_host([5] * 4)
    assert told[2].logprob != told[2].logprob
    assert [told[row] for row in (0, 1, 3)] == [expected[row] for row in (0, 1, 3)]
