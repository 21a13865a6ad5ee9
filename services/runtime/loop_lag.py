"""How far behind its own time the event loop is."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry, Histogram

from kvern.services.runtime.metrics import LATENCY_BUCKETS_S

SAMPLE_INTERVAL_S = 0.5


class LoopLag:
    """Finds by how much timers come late: all that the process does waits as long for its turn."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag = Histogram(
            "kvern_event_loop_lag_seconds",
            "How late timers of the event loop come, sampled twice a second. All that the process does waits as long.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )

    async def watch(self) -> None:
        """Sample for ever."""
        while True:
            # Not the loop's own clock: it stands still while the loop is busy.
            due_at = time.monotonic() + SAMPLE_INTERVAL_S
            await asyncio.sleep(SAMPLE_INTERVAL_S)
            self._lag.observe(max(0.0, time.monotonic() - due_at))
