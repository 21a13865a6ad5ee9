from __future__ import annotations

import asyncio
import threading

import pytest

from kvern.services.runtime.errors import ResourceExhausted
from kvern.services.tokenizer.workers import Workers


async def test_job_over_the_bound_is_refused_and_taken_once_one_has_ended() -> None:
    release = threading.Event()
    with Workers(max_jobs=2) as workers:
        jobs = [asyncio.create_task(workers.run(release.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted, match="2 jobs") as refusal:
            await workers.run(int)
        assert refusal.value.retry_after_s > 0
        release.set()
        await asyncio.gather(*jobs)
        assert await workers.run(int, "7") == 7


async def test_cancelled_caller_leaves_its_slot_to_the_job_until_that_ends() -> None:
    begun, release = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait()

    with Workers(max_jobs=1) as workers:
        job = asyncio.create_task(workers.run(work))
        await asyncio.to_thread(begun.wait)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        with pytest.raises(ResourceExhausted):
            await workers.run(int)
        release.set()
        async with asyncio.timeout(10):
            while True:
                try:
                    assert await workers.run(int) == 0
                    return
                except ResourceExhausted:
                    await asyncio.sleep(0)


async def test_what_a_job_raises_reaches_its_caller() -> None:
    with Workers() as workers:
        with pytest.raises(ValueError, match="invalid literal"):
            await workers.run(int, "x")
        assert await workers.run(int, "1") == 1
