"""Several replicas for the tests that make them fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from kvern.client import AsyncClient
from tests.collector import QUICKLY, Collector, collecting
from tests.up_process import UpProcess, first_free_port

from .crowd import Crowd
from .fleet import BUDGET, NO_HELP, NUM_REPLICAS, wait_ready


@pytest.fixture(scope="package")
def collected() -> Iterator[tuple[Collector, str]]:
    with collecting() as collected:
        yield collected


@pytest.fixture(scope="package")
def collector(collected: tuple[Collector, str]) -> Collector:
    return collected[0]


@pytest.fixture(scope="package")
def smg_doors() -> list[str]:
    """Where the replicas are reached by SMG."""
    first = first_free_port(NUM_REPLICAS)
    return [f"127.0.0.1:{first + index}" for index in range(NUM_REPLICAS)]


@pytest.fixture(scope="package")
def replicas(
    tmp_path_factory: pytest.TempPathFactory, collected: tuple[Collector, str], smg_doors: list[str]
) -> Iterator[UpProcess]:
    """A set that traces what comes with a trace, and nothing else."""
    flags = [f"--replicas={NUM_REPLICAS}", "--max-model-len=256", "--num-blocks=256", "--num-threads=1", BUDGET]
    flags += [f"--otlp-endpoint={collected[1]}", "--trace-sample-ratio=0"]
    flags += [f"--smg-listen={smg_doors[0]}", "--smg-kv-events"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUICKLY.items():
            patch.setenv(name, value)
        process = UpProcess(tmp_path_factory.mktemp("replicas"), *flags)
    with process as up:
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
