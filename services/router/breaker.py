"""Keeps requests away from a replica whose calls fail though it says that it is well."""

from __future__ import annotations

MAX_FAILURES = 3
"""In a row; then the circuit opens."""

MIN_OPEN_S = 1.0
MAX_OPEN_S = 30.0
"""How long it stays open, in seconds: doubles with each probe that fails."""


class CircuitBreaker:
    """Closed: all requests pass. Open: none. After a while one may try, and its outcome closes or opens it again.

    Times are of any one clock, in seconds.
    """

    def __init__(self) -> None:
        self._num_failures = 0
        self._open_s = MIN_OPEN_S
        self._opens_until = 0.0
        self._failed_at = float("-inf")
        self._is_probing = False

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        if self._num_failures < MAX_FAILURES:
            return True
        return now >= self._opens_until and not self._is_probing

    def begin(self) -> bool:
        """A request is sent. Returns whether it is a probe: then tell how it ended, with `give_up` if with neither."""
        self._is_probing = self._num_failures >= MAX_FAILURES
        return self._is_probing

    def succeed(self) -> None:
        """A request was answered."""
        self._num_failures, self._open_s, self._is_probing = 0, MIN_OPEN_S, False

    def fail(self, sent_at: float, now: float) -> None:
        """A request failed. Those that were under way when another failed tell of the same fault: they do not count."""
        self._is_probing = False
        if sent_at < self._failed_at:
            return
        self._failed_at = now
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            self._opens_until = now + self._open_s
            self._open_s = min(2 * self._open_s, MAX_OPEN_S)

    def give_up(self) -> None:
        """The probe ended without an answer or a failure, say because its client went away."""
        self._is_probing = False
