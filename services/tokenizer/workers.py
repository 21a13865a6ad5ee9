"""Threads for work that would hold up the event loop, and bounds on what waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from kvern.services.runtime.cores import usable_cores
from kvern.services.runtime.errors import ResourceExhausted

LARGE_BYTES = 1024 * 1024
"""A request above this is large. While a tokenizer encodes a text it takes some hundred times the text's size."""

MAX_JOBS = 256
MAX_BYTES = 256 * 1024 * 1024
"""Of the requests that jobs hold. Small ones reach MAX_JOBS first, large ones this."""

RETRY_AFTER_S = 0.5

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class Workers:
    """A thread for each usable core, since encoding releases the GIL, and one more that large requests take in turns.

    So small requests do not wait for large ones, and only one of these at a time takes the memory that it needs. As
    many again for each model render its chats: where a template takes its time, that is its own model's. Used from one
    event loop.
    """

    def __init__(self, models: Iterable[str] = (), *, max_jobs: int = MAX_JOBS, max_bytes: int = MAX_BYTES) -> None:
        self.num_refused = {"jobs": 0, "bytes": 0}
        """Requests refused, by the bound that was reached."""
        num_cores = usable_cores()
        self._small = _Threads(num_cores, "worker", max_jobs, max_bytes, self.num_refused)
        self._large = _Threads(1, "large-worker", max_jobs, max_bytes, self.num_refused)
        self._chats = {
            model: _Threads(num_cores, f"chats-{model}", max_jobs, max_bytes, self.num_refused) for model in models
        }

    async def run(
        self, num_bytes: int, function: Callable[_Params, _Result], *args: _Params.args, **kwargs: _Params.kwargs
    ) -> _Result:
        """Call a function in a thread. A cancelled call that has not begun never does. Raises ResourceExhausted.

        num_bytes: of the request that this is for.
        """
        threads = self._large if num_bytes > LARGE_BYTES else self._small
        return await threads.run(num_bytes, partial(function, *args, **kwargs))

    async def render(self, model: str, num_bytes: int, function: Callable[[], _Result]) -> _Result:
        """Call a function that renders a chat of a model, as `run` does."""
        return await self._chats[model].run(num_bytes, function)

    @property
    def num_jobs(self) -> int:
        """Jobs running and waiting."""
        return sum(threads.num_jobs for threads in self._all)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for threads in self._all:
            threads.shutdown()

    @property
    def _all(self) -> list[_Threads]:
        return [self._small, self._large, *self._chats.values()]


class _Threads:
    """A pool of threads with bounds on its jobs, running and waiting."""

    def __init__(self, num_threads: int, name: str, max_jobs: int, max_bytes: int, num_refused: dict[str, int]) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._idle = asyncio.Semaphore(num_threads)
        self._max_jobs, self.num_jobs = max_jobs, 0
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._num_refused = num_refused

    async def run(self, num_bytes: int, function: Callable[[], _Result]) -> _Result:
        self._enter(num_bytes)
        try:
            # The wait is here because the pool's own queue keeps what a cancelled call held.
            await self._idle.acquire()
        except asyncio.CancelledError:
            self._leave(num_bytes)
            raise
        job = asyncio.get_running_loop().run_in_executor(self._pool, function)
        job.add_done_callback(lambda _: self._end(num_bytes))
        # Its place belongs to the job, not to its caller: one whose caller has gone still runs to its end.
        return await asyncio.shield(job)

    def shutdown(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _enter(self, num_bytes: int) -> None:
        if self.num_jobs == self._max_jobs:
            self._num_refused["jobs"] += 1
            raise ResourceExhausted(f"{self.num_jobs} requests are waiting", retry_after_s=RETRY_AFTER_S)
        if self._num_bytes + num_bytes > self._max_bytes:
            self._num_refused["bytes"] += 1
            raise ResourceExhausted(f"requests of {self._num_bytes:,} bytes are waiting", retry_after_s=RETRY_AFTER_S)
        self.num_jobs += 1
        self._num_bytes += num_bytes

    def _leave(self, num_bytes: int) -> None:
        self.num_jobs -= 1
        self._num_bytes -= num_bytes

    def _end(self, num_bytes: int) -> None:
        self._leave(num_bytes)
        self._idle.release()
