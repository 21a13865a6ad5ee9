from __future__ import annotations

import random

from kvern.services.router.choice import Candidate, by_cost


def test_choice_fewest_requests_comes_first() -> None:
    candidates = [Candidate("a", 3), Candidate("b", 0), Candidate("c", 1)]
    assert [each.address for each in by_cost(candidates, random.Random(0))] == ["b", "c", "a"]


def test_choice_among_equals_is_spread() -> None:
    rng = random.Random(0)
    candidates = [Candidate("a", 1), Candidate("b", 1), Candidate("c", 1), Candidate("d", 2)]
    first = [by_cost(candidates, rng)[0].address for _ in range(300)]
    assert all(70 <= first.count(address) <= 130 for address in "abc")
