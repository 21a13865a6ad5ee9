"""A limit on how long a stream's reader may hold up its call."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from kvern.services.runtime.errors import ResourceExhausted
from kvern.services.runtime.interceptors import end_call

SLOW_READER = "SLOW_READER"

RETRY_AFTER_S = 1.0
"""What a reader is told to wait before it asks again, in seconds."""


class ReaderWatch:
    """Ends the call it is entered in with ResourceExhausted once its reader has held it up for `limit_s` seconds.

    It is held up from `hold` until `release`. Both cost next to nothing: one timer runs for many of them.
    """

    def __init__(self, limit_s: float) -> None:
        self.verdict: ResourceExhausted | None = None
        """What it ended the call with, if it did."""
        self._limit_s = limit_s
        self._held_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._call = asyncio.current_task()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def hold(self) -> None:
        """Begin to count, unless it has begun."""
        if self._held_since is None:
            self._held_since = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(self._limit_s, self._check)

    def release(self) -> None:
        self._held_since = None

    def _check(self) -> None:
        self._timer = None
        if self._held_since is None or self._call is None:
            return
        remaining_s = self._held_since + self._limit_s - self._loop.time()
        if remaining_s > 0:
            self._timer = self._loop.call_later(remaining_s, self._check)
        else:
            message = f"the reader has held up its call for {self._limit_s:g} s"
            self.verdict = ResourceExhausted(message, retry_after_s=RETRY_AFTER_S, reason=SLOW_READER)
            end_call(self._call, self.verdict)
