from __future__ import annotations

import pytest

from kvern.services.detokenizer.prefill_speed import DEADLINE_UNREACHABLE, MAX_AGE_S, MIN_TOKENS, PrefillSpeed
from kvern.services.runtime.errors import ResourceExhausted

NOW = 1000.0


@pytest.fixture
def learnt() -> PrefillSpeed:
    """2,000 tokens a second."""
    speed = PrefillSpeed()
    speed.observe(4000, 2.0, NOW)
    return speed


def test_wait_follows_what_was_seen(learnt: PrefillSpeed) -> None:
    assert learnt.wait_s(10_000, NOW) == pytest.approx(5.0)
    assert learnt.wait_s(0, NOW) == 0
    for _ in range(50):
        learnt.observe(4000, 8.0, NOW)
    assert learnt.wait_s(10_000, NOW) == pytest.approx(20.0, rel=0.01)


def test_short_waits_behind_few_tokens_weigh_little(learnt: PrefillSpeed) -> None:
    for _ in range(3):
        learnt.observe(1, 0.05, NOW)
    assert learnt.wait_s(10_000, NOW) == pytest.approx(5.0, rel=0.25)


def test_request_that_cannot_begin_in_time_is_refused_with_the_wait(learnt: PrefillSpeed) -> None:
    with pytest.raises(ResourceExhausted, match=r"the deadline is in 2 s, the wait is about 5 s") as refused:
        learnt.check_deadline(2.0, 10_000, NOW)
    assert (refused.value.reason, refused.value.retry_after_s) == (DEADLINE_UNREACHABLE, pytest.approx(5.0))


def test_request_that_may_begin_in_time_or_has_no_deadline_is_taken(learnt: PrefillSpeed) -> None:
    learnt.check_deadline(3.0, 10_000, NOW)
    learnt.check_deadline(None, 10**9, NOW)
    learnt.check_deadline(0.001, 0, NOW)


def test_nothing_is_refused_on_too_little_or_old_knowledge(learnt: PrefillSpeed) -> None:
    learnt.check_deadline(0.001, 10**6, NOW + MAX_AGE_S + 1)
    new = PrefillSpeed()
    new.check_deadline(0.001, 10**6, NOW)
    new.observe(0, 60.0, NOW)
    new.observe(MIN_TOKENS - 1, 60.0, NOW)
    new.check_deadline(0.001, 10**6, NOW)
