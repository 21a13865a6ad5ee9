from __future__ import annotations

from kvern.services.router.breaker import MAX_FAILURES, MAX_OPEN_S, MIN_OPEN_S, CircuitBreaker


def _opened(at: float = 100.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(MAX_FAILURES):
        assert breaker.allows(at)
        breaker.fail(sent_at=at, now=at)
    return breaker


def test_circuit_opens_after_failures_in_a_row_only() -> None:
    breaker = CircuitBreaker()
    for number in range(2 * MAX_FAILURES):
        breaker.fail(float(number), float(number))
        if number % 2:
            breaker.succeed()
    assert breaker.allows(100.0)
    assert not _opened().allows(100.0)


def test_failures_of_one_moment_count_once() -> None:
    """A replica that dies fails every call it has."""
    breaker = CircuitBreaker()
    for _ in range(20):
        breaker.fail(sent_at=99.0, now=100.0)
    assert breaker.allows(100.0)


def test_open_circuit_lets_one_probe_through_at_a_time() -> None:
    breaker = _opened(100.0)
    later = 100.0 + MIN_OPEN_S
    assert not breaker.allows(later - 0.01)
    assert breaker.allows(later)
    assert breaker.begin()
    assert not breaker.allows(later)
    breaker.give_up()
    assert breaker.allows(later)
    assert breaker.begin()
    breaker.succeed()
    assert breaker.allows(later)
    assert not breaker.begin()


def test_probe_that_fails_opens_for_twice_as_long_up_to_a_limit() -> None:
    breaker, now, open_s = _opened(100.0), 100.0, MIN_OPEN_S
    for _ in range(10):
        now += open_s
        assert breaker.allows(now)
        breaker.begin()
        breaker.fail(now, now)
        open_s = min(2 * open_s, MAX_OPEN_S)
        assert not breaker.allows(now + open_s - 0.01)
    assert open_s == MAX_OPEN_S
