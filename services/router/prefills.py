"""The prompts that this router sent to a replica a moment ago: work, and blocks that the index cannot know yet."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

DIGEST_BYTES = 16

GRACE_S = 0.5
"""How long a prompt's blocks count as resident after its first token: by then the index has heard of them."""

MAX_REMEMBERED = 64
"""Prompts whose blocks count as resident; the oldest goes first."""


@dataclass(slots=True, eq=False)
class Prefill:
    """One prompt that was sent."""

    num_tokens: int
    """What the replica computes of it."""
    num_matched: int
    """What it need not compute."""
    digests: bytes
    """Of its full blocks, joined."""
    is_waiting: bool = True
    """Whether the replica has not begun with it."""
    ended_at: float | None = None
    """When its first token came, or its request ended without one."""


class Prefills:
    """One replica's prompts.

    Their tokens are queued there until the first output token has come, and their blocks count as resident until
    shortly after: so a burst of one cold prefix goes to few replicas, which compute it once for all.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_tokens = 0
        """Prompt tokens sent that are still to be computed."""
        self.num_reported = 0
        """The same as the replica itself counts: what waits there counts whole."""
        self._clock = clock
        self._remembered: deque[Prefill] = deque(maxlen=MAX_REMEMBERED)

    def begin(self, num_tokens: int, num_matched: int, digests: bytes) -> Prefill:
        """Count a prompt that is being sent. Without digests, its blocks are none that others could use."""
        prefill = Prefill(num_tokens, num_matched, digests)
        self.num_tokens += num_tokens
        self.num_reported += num_tokens + num_matched
        if digests:
            self._remembered.append(prefill)
        return prefill

    def schedule(self, prefill: Prefill) -> None:
        """Count a prompt as one that the replica has begun with. Later calls change nothing."""
        if prefill.is_waiting:
            prefill.is_waiting = False
            self.num_reported -= prefill.num_matched

    def compute(self, prefill: Prefill) -> None:
        """Count a prompt as computed: its first token has come. Later calls change nothing."""
        if prefill.ended_at is None:
            self._end(prefill)

    def drop(self, prefill: Prefill) -> None:
        """Forget a prompt whose request ended, unless it was computed before."""
        if prefill.ended_at is None:
            self._end(prefill)
            if prefill in self._remembered:
                self._remembered.remove(prefill)

    def num_blocks(self, digests: bytes, num_matched: int) -> int:
        """Return how many blocks of a prompt are there or coming, of which the index knows `num_matched`."""
        place = num_matched * DIGEST_BYTES
        following = digests[place : place + DIGEST_BYTES]
        if not following:
            return num_matched
        oldest = self._clock() - GRACE_S
        # Most prompts have nothing in common, which the first block in question shows.
        alike = (
            each.digests
            for each in self._remembered
            if each.digests.startswith(following, place) and (each.ended_at is None or each.ended_at > oldest)
        )
        return max((num_common(each, digests, num_matched) for each in alike), default=num_matched)

    def _end(self, prefill: Prefill) -> None:
        self.schedule(prefill)
        self.num_tokens -= prefill.num_tokens
        self.num_reported -= prefill.num_tokens
        prefill.ended_at = self._clock()


def num_common(first: bytes, second: bytes, start: int = 0) -> int:
    """Return how many blocks two prompts share by their joined digests, of which `start` are known to be the same.

    A digest stands for all tokens up to its block's end, so where one differs all later ones do: bisection finds it.
    """

    def differs(block: int) -> bool:
        place = slice(block * DIGEST_BYTES, (block + 1) * DIGEST_BYTES)
        return first[place] != second[place]

    end = min(len(first), len(second)) // DIGEST_BYTES
    return start + bisect_left(range(start, end), True, key=differs)
