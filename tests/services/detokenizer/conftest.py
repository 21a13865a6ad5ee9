from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from .scripted_engine import ScriptedEngine
from .setup import MAX_STREAMS, SERVING, Setup, detokenizing


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setup]:
    folder = tmp_path_factory.mktemp("detokenizer")
    async with detokenizing(ScriptedEngine(), folder, "--max-streams", str(MAX_STREAMS)) as setup:
        yield setup


@pytest_asyncio.fixture(loop_scope="package")
async def setup(started: Setup) -> Setup:
    started.engine.says_hello.set()
    await started.health_becomes(SERVING)
    for commands in (started.engine.aborted, started.engine.parked, started.engine.unparked):
        while not commands.empty():
            commands.get_nowait()
    return started
