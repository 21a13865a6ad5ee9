"""Watches the engine thread: whether a step is stuck is told to all who send work here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from kvern.services.engine.engine_thread import EngineThread
from kvern.services.runtime.stall import StallRule

INTERVAL_S = 0.5

_log = structlog.get_logger("kvern.engine")


class StallWatch:
    """Judges the step under way. All methods belong to the event loop."""

    def __init__(self, thread: EngineThread, on_change: Callable[[bool], None], rule: StallRule) -> None:
        """on_change: told whether a step is stuck, whenever that changes."""
        self._thread = thread
        self._on_change = on_change
        self._rule = rule
        self._was_stuck = False

    @property
    def is_stuck(self) -> bool:
        """Whether the step under way takes so long that something must be wrong."""
        return self._judge(self._rule.is_stuck)

    async def run(self) -> None:
        """Watch for ever."""
        while True:
            self._look()
            await asyncio.sleep(INTERVAL_S)

    def find_trouble(self) -> str:
        """Return what only a restart can mend, or nothing. An engine that loads has no such trouble."""
        age_s = self._thread.step_age_s
        return f"the engine's step has not ended for {age_s:.0f} s" if self._judge(self._rule.is_dead) else ""

    def _look(self) -> None:
        is_stuck = self.is_stuck
        if is_stuck == self._was_stuck:
            return
        self._was_stuck = is_stuck
        if is_stuck:
            _log.error(
                "a step is stuck", age_s=round(self._thread.step_age_s, 1), expected_s=self._thread.expected_step_s
            )
        else:
            _log.info("steps go on")
        self._on_change(is_stuck)

    def _judge(self, rule: Callable[[float, float], bool]) -> bool:
        return rule(self._thread.step_age_s, self._thread.expected_step_s)


@asynccontextmanager
async def watching(watch: StallWatch) -> AsyncIterator[None]:
    """Watch while the block runs."""
    task = asyncio.create_task(watch.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
