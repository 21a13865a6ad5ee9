"""How many requests may be sent twice: retries must not make an overload worse."""

from __future__ import annotations

SHARE = 0.1
"""Of all requests, how many may be sent once more."""

RESERVE = 100.0
"""Requests that may be sent once more whatever came before, and what may be saved up at most."""


class RetryBudget:
    """A token bucket that requests fill. Retries and hedges of one router draw on the same one."""

    def __init__(self) -> None:
        self._balance = RESERVE

    def earn(self) -> None:
        """A request has come."""
        self._balance = min(self._balance + SHARE, RESERVE)

    def spend(self) -> bool:
        """Take what one more try costs. Returns whether it was there."""
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True
