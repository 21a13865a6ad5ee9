from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.services.detokenizer.setup import SERVING

from .door import Door, open_door


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def opened(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    async with open_door(tmp_path_factory.mktemp("door"), "--max-streams=4") as door:
        yield door


@pytest_asyncio.fixture(loop_scope="package")
async def door(opened: Door) -> Door:
    opened.engine.says_hello.set()
    await opened.setup.health_becomes(SERVING)
    while not opened.engine.aborted.empty():
        opened.engine.aborted.get_nowait()
    return opened
