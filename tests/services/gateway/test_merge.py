"""Several streams read as one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator

import pytest

from kvern.services.gateway.merge import MAX_AT_ONCE, merged
from tests.for_ever import for_ever


class Sources:
    """Counts how many are open."""

    def __init__(self) -> None:
        self.num_open = 0
        self.most_open = 0

    async def items(self, count: int, *, fails: bool = False, hangs: bool = False) -> AsyncGenerator[int, None]:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            for number in range(count):
                await asyncio.sleep(0)
                yield number
            if fails:
                raise ValueError("broken")
            if hangs:
                await for_ever()
        finally:
            self.num_open -= 1


@pytest.mark.parametrize("count", [1, 2, 3 * MAX_AT_ONCE])
async def test_all_items_come_with_their_source_s_number_and_few_are_open_at_once(count: int) -> None:
    sources = Sources()
    items = [item async for item in merged([sources.items(100) for _ in range(count)])]
    assert Counter(number for number, _ in items) == dict.fromkeys(range(count), 100)
    assert [item for number, item in items if number == 0] == list(range(100))
    assert sources.num_open == 0
    assert sources.most_open <= MAX_AT_ONCE


async def test_error_of_one_ends_all() -> None:
    sources = Sources()
    with pytest.raises(ValueError, match="broken"):
        async for _ in merged([sources.items(1, hangs=True), sources.items(50, fails=True)]):
            pass
    assert sources.num_open == 0
    assert len(asyncio.all_tasks()) == 1


async def test_closing_it_closes_all() -> None:
    sources = Sources()
    items = merged([sources.items(1000) for _ in range(3)])
    await anext(items)
    await items.aclose()
    assert sources.num_open == 0
    assert len(asyncio.all_tasks()) == 1
