"""Several replicas for the tests that make them fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from kvern.client import AsyncClient
from tests.up_process import UpProcess

from .crowd import Crowd
from .fleet import NO_HELP, NUM_REPLICAS, wait_ready


@pytest.fixture(scope="package")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    flags = (f"--replicas={NUM_REPLICAS}", "--max-model-len=256", "--num-blocks=256", "--num-threads=1")
    with UpProcess(tmp_path_factory.mktemp("replicas"), *flags) as up:
        up.wait_ready()
        yield up


@pytest_asyncio.fixture(loop_scope="module")
async def fleet_client(replicas: UpProcess) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(replicas.listen, retry=NO_HELP) as connected:
        yield connected


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(replicas: UpProcess) -> list[str]:
    """What the crowd gets while nothing fails."""
    async with AsyncClient(replicas.listen, retry=NO_HELP) as client:
        await wait_ready(client)
        return await Crowd(client).run()
