"""A client's deadline on its way through the router: each hop gets what is left, less what the way back takes."""

from __future__ import annotations

TOKENIZER_SHARE = 0.5
"""Of the time left, how much the tokenizer may take: without the rest no replica can answer."""

_MAX_START_S = 10.0
_START_SHARE = 0.5
"""Of the time left, how much a request may wait for a replica that is starting."""

_MAX_HOP_S = 0.05
_HOP_SHARE = 0.1
"""What the way back from a replica takes of the time left, so that its verdict comes in time."""


def for_start(remaining_s: float | None) -> float:
    """Return how long a request may wait for a replica that is starting, in seconds."""
    return _MAX_START_S if remaining_s is None else min(_MAX_START_S, _START_SHARE * remaining_s)


def for_tokenizer(remaining_s: float | None) -> float | None:
    """Return how long the tokenizer has, in seconds; None where there is no deadline."""
    return None if remaining_s is None else TOKENIZER_SHARE * remaining_s


def for_replica(remaining_s: float | None) -> float | None:
    """Return how long a replica has, in seconds; None where there is no deadline."""
    return None if remaining_s is None else remaining_s - min(_MAX_HOP_S, _HOP_SHARE * remaining_s)
