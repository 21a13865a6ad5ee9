from __future__ import annotations

import pytest

from kvern.services.detokenizer.prefill_speed import MAX_AGE_S, MIN_TOKENS, PrefillSpeed

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


def test_nothing_is_predicted_from_too_little_or_old_knowledge(learnt: PrefillSpeed) -> None:
    assert learnt.wait_s(10**6, NOW + MAX_AGE_S + 1) == 0
    new = PrefillSpeed()
    assert new.wait_s(10**6, NOW) == 0
    new.observe(0, 60.0, NOW)
    new.observe(MIN_TOKENS - 1, 60.0, NOW)
    assert new.wait_s(10**6, NOW) == 0
