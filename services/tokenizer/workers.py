"""Threads for work that would hold up the event loop, and a bound on what waits for them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from kvern.services.runtime.errors import ResourceExhausted

MAX_JOBS = 256
"""Running and waiting. A job holds its request's text, so this bounds memory too."""

RETRY_AFTER_S = 0.5

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class Workers:
    """A thread for each core: encoding releases the GIL, so they run at once."""

    def __init__(self, max_jobs: int = MAX_JOBS) -> None:
        self._pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="worker")
        self._max_jobs = max_jobs
        self._slots = threading.Semaphore(max_jobs)

    async def run(self, function: Callable[_Params, _Result], *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        """Call a function in a thread. A cancelled call that has not begun never does. Raises ResourceExhausted."""
        if not self._slots.acquire(blocking=False):
            raise ResourceExhausted(f"{self._max_jobs} jobs are waiting", retry_after_s=RETRY_AFTER_S)
        job = self._pool.submit(function, *args, **kwargs)
        # The slot belongs to the job, not to its caller: one whose caller has gone still runs to its end.
        job.add_done_callback(lambda _: self._slots.release())
        return await asyncio.wrap_future(job)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
