from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from kvern.services.runtime.errors import ResourceExhausted
from kvern.services.tokenizer.workers import LARGE_BYTES, Workers

SMALL, LARGE = 100, LARGE_BYTES + 1


@contextmanager
def releasing() -> Iterator[threading.Event]:
    """Yield what jobs may wait for, and set it in the end, or a failing test would never end."""
    release = threading.Event()
    try:
        yield release
    finally:
        release.set()


async def result_of(attempt: Callable[[], Awaitable[int]]) -> int:
    """Try until there is room."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await attempt()
            except ResourceExhausted:
                await asyncio.sleep(0)


@pytest.mark.parametrize("num_bytes", [SMALL, LARGE])
async def test_job_over_the_number_is_refused_and_taken_once_one_has_ended(num_bytes: int) -> None:
    with Workers(max_jobs=2) as workers, releasing() as release:
        jobs = [asyncio.create_task(workers.run(num_bytes, release.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted, match="2 requests are waiting") as refusal:
            await workers.run(num_bytes, int)
        assert refusal.value.retry_after_s > 0
        assert (workers.num_refused, workers.num_jobs) == ({"jobs": 1, "bytes": 0}, 2)
        release.set()
        await asyncio.gather(*jobs)
        assert await workers.run(num_bytes, int, "7") == 7


async def test_job_over_the_bytes_is_refused_and_small_ones_are_not() -> None:
    with Workers(max_bytes=2 * LARGE) as workers, releasing() as release:
        jobs = [asyncio.create_task(workers.run(LARGE, release.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted, match="requests of 2,097,154 bytes are waiting"):
            await workers.run(LARGE, int)
        assert workers.num_refused == {"jobs": 0, "bytes": 1}
        assert await workers.run(SMALL, int, "7") == 7
        release.set()
        await asyncio.gather(*jobs)
        assert await workers.run(LARGE, int, "7") == 7
        assert workers.num_jobs == 0


async def test_as_many_jobs_run_at_once_as_cores_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvern.services.tokenizer.workers.usable_cores", lambda: 1)
    with Workers() as workers, releasing() as release:
        first = asyncio.create_task(workers.run(SMALL, release.wait))
        second = asyncio.create_task(workers.run(SMALL, release.set))
        # A large one has a thread of its own, and ends when there was time for the second to begin.
        await workers.run(LARGE, int)
        assert not release.is_set()
        second.cancel()
        release.set()
        await first


async def test_large_jobs_run_one_at_a_time_and_do_not_hold_up_small_ones() -> None:
    begun: list[int] = []

    def work(number: int, release: threading.Event) -> None:
        begun.append(number)
        release.wait()

    with Workers() as workers, releasing() as release:
        jobs = [asyncio.create_task(workers.run(LARGE, work, number, release)) for number in range(3)]
        assert await workers.run(SMALL, int, "7") == 7
        assert len(begun) <= 1
        release.set()
        await asyncio.gather(*jobs)
        assert begun == [0, 1, 2]


async def test_cancelled_caller_leaves_its_place_to_the_job_until_that_ends() -> None:
    begun = threading.Event()

    def work(release: threading.Event) -> None:
        begun.set()
        release.wait()

    with Workers(max_jobs=1) as workers, releasing() as release:
        job = asyncio.create_task(workers.run(SMALL, work, release))
        await asyncio.to_thread(begun.wait)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        with pytest.raises(ResourceExhausted):
            await workers.run(SMALL, int)
        release.set()
        assert await result_of(lambda: workers.run(SMALL, int)) == 0


class Text(str):
    """A string that a weak reference can watch."""


async def test_cancelled_call_that_has_not_begun_never_does_and_holds_nothing() -> None:
    done: list[Text] = []
    with Workers(max_jobs=2) as workers, releasing() as release:
        running = asyncio.create_task(workers.run(LARGE, release.wait))
        text = Text("long")
        watched = weakref.ref(text)
        waiting = asyncio.create_task(workers.run(LARGE, done.append, text))
        del text
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        del waiting
        await asyncio.sleep(0)  # the loop's last step still holds the task that ended
        gc.collect()
        assert watched() is None
        next_one = asyncio.create_task(workers.run(LARGE, int, "7"))  # there is room for it
        release.set()
        assert await next_one == 7
        await running
    assert done == []


async def test_what_a_job_raises_reaches_its_caller() -> None:
    with Workers() as workers:
        with pytest.raises(ValueError, match="invalid literal"):
            await workers.run(SMALL, int, "x")
        assert await workers.run(SMALL, int, "1") == 1
