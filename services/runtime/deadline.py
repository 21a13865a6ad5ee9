"""When a deadline is not worth trying to keep."""

from __future__ import annotations

from kvern.services.runtime.errors import ResourceExhausted

DEADLINE_UNREACHABLE = "DEADLINE_UNREACHABLE"

_MARGIN = 2.0
"""How many times longer than the time left a wait must be: it is a prediction."""


def check_reachable(wait_s: float, remaining_s: float | None) -> None:
    """Raise ResourceExhausted if a request could not even begin in time.

    wait_s: the least it is expected to wait; remaining_s: until its deadline, None if it has none.
    """
    if remaining_s is not None and wait_s > _MARGIN * remaining_s:
        message = f"the deadline is in {remaining_s:.2g} s, the wait is about {wait_s:.2g} s"
        raise ResourceExhausted(message, retry_after_s=wait_s, reason=DEADLINE_UNREACHABLE)
