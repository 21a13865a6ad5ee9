from __future__ import annotations

from kvern.services.router.retry_budget import RESERVE, RetryBudget


def test_budget_lasts_for_the_reserve_then_for_a_tenth_of_requests() -> None:
    budget = RetryBudget()
    assert sum(budget.spend() for _ in range(1000)) == RESERVE
    num_spent = 0
    for _ in range(1000):
        budget.earn()
        num_spent += budget.spend()
    assert 99 <= num_spent <= 100


def test_budget_saves_up_no_more_than_the_reserve() -> None:
    budget = RetryBudget()
    for _ in range(10_000):
        budget.earn()
    assert sum(budget.spend() for _ in range(1000)) == RESERVE
