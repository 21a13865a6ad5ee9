"""When a call that failed is made again."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import grpc

from kvern.client.errors import KvernError

_MAX_DOUBLINGS = 30
"""Enough for any delay, and no number grows too large for a float."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how soon calls are made again.

    A call is made again if it ended UNAVAILABLE, or RESOURCE_EXHAUSTED with a delay to wait that the server named;
    never if the wait would outlast the caller's time limit.
    """

    max_retries: int = 4
    """Further calls while nothing of the answer has come."""
    max_resumptions: int = 12
    """Further calls, one after the other, that may fail to take up a stream that broke. By default they last half a
    minute, so that a server can restart."""
    first_delay_s: float = 0.1
    """Doubled with every failure in a row."""
    max_delay_s: float = 5.0

    def delay_s(self, num_failures: int) -> float:
        """Return how long to wait after so many failures in a row: at random, so that many clients spread."""
        num_doublings = min(num_failures - 1, _MAX_DOUBLINGS)
        step_s = min(self.max_delay_s, self.first_delay_s * 2.0**num_doublings)
        return step_s * random.uniform(0.5, 1)


DEFAULT_RETRY_POLICY = RetryPolicy()


class TimeLimit:
    """A time limit that runs from now on, or none."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._began_at = time.monotonic()

    @property
    def left_s(self) -> float | None:
        if self.timeout_s is None:
            return None
        return max(0.0, self._began_at + self.timeout_s - time.monotonic())

    def allows(self, delay_s: float) -> bool:
        """Whether something is left of it after a wait."""
        left_s = self.left_s
        return left_s is None or delay_s < left_s


class Retries:
    """Counts failures in a row against a policy."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._num_failures = 0

    def reset(self) -> None:
        self._num_failures = 0

    def delay_after(self, error: KvernError, max_failures: int, *limits: TimeLimit) -> float:
        """Return how long to wait before the next call, in seconds. Raises the error if there shall be none."""
        self._num_failures += 1
        delay_s = (error.retry_after_s or 0.0) + self._policy.delay_s(self._num_failures)
        if self._num_failures > max_failures or not all(limit.allows(delay_s) for limit in limits):
            raise error
        return delay_s


def may_pass(error: KvernError) -> bool:
    """Whether the cause is one that goes away: the server or a part of it was gone, or full and said for how long."""
    if error.code is grpc.StatusCode.UNAVAILABLE:
        return True
    return error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after_s is not None
