"""How long a request will wait for its turn."""

from __future__ import annotations

MIN_TOKENS = 1024
"""Waits behind fewer tokens in all say more of a step's length than of a prompt token's."""

MAX_AGE_S = 30.0
"""What was seen longer ago says nothing of now: with everybody refused, nothing new would be seen."""

_DECAY = 0.8
"""Weight of what was seen before, with each further request."""


class PrefillSpeed:
    """Learns how quickly queued prompt tokens are worked off, from how long requests waited behind them."""

    def __init__(self) -> None:
        # Sums rather than speeds, so that short waits behind few tokens weigh little.
        self._num_tokens = 0.0
        self._duration_s = 0.0
        self._seen_at = 0.0

    def observe(self, num_tokens: int, wait_s: float, now: float) -> None:
        """A request's turn has come. `num_tokens` were queued when it arrived."""
        if num_tokens > 0:
            self._num_tokens = _DECAY * self._num_tokens + num_tokens
            self._duration_s = _DECAY * self._duration_s + wait_s
            self._seen_at = now

    def wait_s(self, num_tokens: int, now: float) -> float:
        """Return how long a request will wait behind that many tokens; 0 if too little is known."""
        if self._num_tokens < MIN_TOKENS or now - self._seen_at > MAX_AGE_S:
            return 0.0
        return num_tokens * self._duration_s / self._num_tokens
