"""Several streams read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

MAX_AT_ONCE = 16
"""Streams of one request that are open together: the others wait, so that one client does not fill a replica."""

_MAX_BUFFERED = 16
_Item = TypeVar("_Item")


async def merged(sources: Sequence[AsyncGenerator[_Item, None]]) -> AsyncGenerator[tuple[int, _Item], None]:
    """Yield what the sources yield, as it comes, each with its source's number. The first error ends all."""
    if len(sources) == 1:  # most often, so without a task in between
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    async with aclosing(_merged(sources)) as all_:
        async for numbered in all_:
            yield numbered


async def _merged(sources: Sequence[AsyncGenerator[_Item, None]]) -> AsyncGenerator[tuple[int, _Item], None]:
    queue: asyncio.Queue[tuple[int, _Item] | Exception | None] = asyncio.Queue(_MAX_BUFFERED)
    places = asyncio.Semaphore(MAX_AT_ONCE)

    async def read(number: int, source: AsyncGenerator[_Item, None]) -> None:
        try:
            async with places, aclosing(source):
                async for item in source:
                    await queue.put((number, item))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    reading = [asyncio.create_task(read(number, source)) for number, source in enumerate(sources)]
    try:
        num_open = len(reading)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in reading:
            task.cancel()
        await asyncio.wait(reading)
