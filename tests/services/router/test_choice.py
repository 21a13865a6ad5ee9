from __future__ import annotations

import random

import pytest

from kvern.services.router.choice import (
    DECODE_WEIGHT,
    QUEUE_WEIGHT,
    SESSION_SLACK,
    Candidate,
    Policy,
    by_cost,
    rank,
    with_home_first,
)

NAMES = [f"replica-{number}" for number in range(8)]


def idle(names: list[str]) -> list[Candidate]:
    return [Candidate(name, 0) for name in names]


def test_cost_counts_prompt_queue_and_requests_in_tokens() -> None:
    candidate = Candidate("a", num_requests=3, matched_tokens=90, uncached_tokens=10, queued_tokens=500)
    assert candidate.cost == 10 + 500 * QUEUE_WEIGHT + 3 * DECODE_WEIGHT


def test_choice_fewest_requests_comes_first() -> None:
    candidates = [Candidate("a", 3), Candidate("b", 0), Candidate("c", 1)]
    assert [each.address for each in by_cost(candidates, random.Random(0))] == ["b", "c", "a"]


def test_choice_prefix_cached_outweighs_load_until_it_does_not() -> None:
    holder = Candidate("holder", 5, matched_tokens=1000, uncached_tokens=24)
    other = Candidate("other", 0, uncached_tokens=1024)
    busy = Candidate("holder", 5, matched_tokens=1000, uncached_tokens=24, queued_tokens=5000)
    for candidates, first in (([holder, other], "holder"), ([busy, other], "other")):
        assert rank(Policy.PREFIX, candidates, random.Random(0))[0].address == first


def test_choice_least_loaded_looks_at_load_alone() -> None:
    holder = Candidate("holder", 1, matched_tokens=1000, uncached_tokens=24)
    other = Candidate("other", 0, uncached_tokens=1024)
    assert rank(Policy.LEAST_LOADED, [holder, other], random.Random(0)) == [other, holder]


@pytest.mark.parametrize("policy", [Policy.PREFIX, Policy.LEAST_LOADED, Policy.RANDOM])
def test_choice_among_equals_is_spread(policy: Policy) -> None:
    rng = random.Random(0)
    first = [rank(policy, idle(["a", "b", "c"]), rng)[0].address for _ in range(300)]
    assert all(70 <= first.count(address) <= 130 for address in "abc")


def test_choice_round_robin_takes_turns_and_skips_who_is_left_out() -> None:
    rng = random.Random(0)
    first = [rank(Policy.ROUND_ROBIN, idle(["b", "a", "c"]), rng, turn=turn)[0].address for turn in range(6)]
    assert first == ["a", "b", "c", "a", "b", "c"]
    assert [each.address for each in rank(Policy.ROUND_ROBIN, idle(["c", "b"]), rng, turn=1)] == ["c", "b"]


def home(candidates: list[Candidate], session_id: str) -> str:
    return with_home_first(candidates, session_id)[0].address


def test_session_goes_to_one_replica_in_whatever_order_they_come() -> None:
    for session_id in ("s", "t", "u"):
        orders = [random.Random(seed).sample(idle(NAMES), len(NAMES)) for seed in range(5)]
        assert len({home(order, session_id) for order in orders}) == 1


def test_sessions_are_spread_and_stay_when_another_replica_leaves() -> None:
    sessions = [f"session-{number}" for number in range(400)]
    before = {session: home(idle(NAMES), session) for session in sessions}
    assert all(20 <= list(before.values()).count(name) <= 90 for name in NAMES)
    after = {session: home(idle(NAMES[1:]), session) for session in sessions}
    assert all(after[session] == before[session] for session in sessions if before[session] != NAMES[0])


def test_session_leaves_its_replica_where_another_has_more_of_the_prompt() -> None:
    candidates = idle(NAMES)
    at_home = home(candidates, "s")
    others = [name for name in NAMES if name != at_home]
    ranked = [Candidate(others[0], 0, matched_tokens=16), *idle([*others[1:], at_home])]
    assert with_home_first(ranked, "s") == ranked


def test_session_leaves_its_replica_when_that_is_overloaded() -> None:
    at_home = home(idle(NAMES), "s")
    others = idle([name for name in NAMES if name != at_home])
    bearable = Candidate(at_home, 0, queued_tokens=int(SESSION_SLACK / QUEUE_WEIGHT))
    assert with_home_first([*others, bearable], "s")[0] == bearable
    overloaded = Candidate(at_home, 0, queued_tokens=int(SESSION_SLACK / QUEUE_WEIGHT) + 1)
    assert with_home_first([*others, overloaded], "s") == [*others, overloaded]


def test_requests_without_session_keep_their_order() -> None:
    assert with_home_first(idle(NAMES), "") == idle(NAMES)
