"""Whose turn it is to write."""

from __future__ import annotations

import asyncio
from collections import deque

TURN_S = 0.001

WRITERS_PER_TURN = 8
"""Writers that go on every TURN_S while more are waiting. A message costs some 50 µs at each service on its way,
however few tokens it has, so more messages than these serve nobody: they would pile up between here and the client.
Measured on two cores that everything shares, 256 streams through the router, one run each. All in line as the loop
comes round: 21,000 tokens/s at most. Four a round, unpaced: 207,000, but 1.2 s late at a tenth of that. Eight a
millisecond: 221,000, and 22 ms late; twelve and sixteen: 132,000, and 25 and 34 ms."""


class Turns:
    """Lets waiting writers go on in the order in which they came, a few at a time.

    In between the loop hears from the engine. So, when there is more to write than should be, the last in line find the
    tokens of several steps, which one message carries at nearly the cost of one token. The first ones wait for nothing.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._line: deque[asyncio.Future[None]] = deque()

    def line_up(self, writer: asyncio.Future[None]) -> None:
        """Give `writer` its result when it is its turn."""
        if not self._line:
            self._loop.call_soon(self._take_turn)
        self._line.append(writer)

    def _take_turn(self) -> None:
        for _ in range(min(WRITERS_PER_TURN, len(self._line))):
            writer = self._line.popleft()
            if not writer.done():
                writer.set_result(None)
        if self._line:
            self._loop.call_later(TURN_S, self._take_turn)
