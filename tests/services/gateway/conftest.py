from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.up_process import free_port

from .scripted_router import STARTED, delta, finished, responds
from .setup import Setup, starting


@pytest.fixture(scope="module")
def listen() -> str:
    """A free address of this machine."""
    return f"127.0.0.1:{free_port()}"


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setup]:
    async with starting(tmp_path_factory.mktemp("gateway"), f"127.0.0.1:{free_port()}") as setup:
        yield setup


@pytest.fixture
def setup(started: Setup) -> Setup:
    started.router.behaviour = responds(STARTED, delta("Hi"), finished())
    started.router.expect_call()
    return started
