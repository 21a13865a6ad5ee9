"""An engine whose step does not end: its replica says so, routers leave it, and no client notices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from kvern.client import AsyncClient
from tests.engine.tiny_llama import save_tiny
from tests.services.engine.test_engine_service import wait_until_serving
from tests.services.index.redis_servers import RedisServer
from tests.services.processes import running, running_python
from tests.services.scraping import status_address
from tests.services.small_tokenizers import byte_level, save
from tests.up_process import PATIENCE_S

from .crowd import Crowd
from .fleet import NO_HELP, wait_ready

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE = str(Path(__file__).with_name("wedgeable_engine.py"))
NUM_REPLICAS = 2
NUM_STREAMS = 4
"""Through each router."""
MAX_TOKENS = 100
NUM_NEWCOMERS = 16
"""Through each router. By load alone some would go to a replica that has all streams before them."""


@dataclass(frozen=True)
class Replica:
    address: str
    engine: asyncio.subprocess.Process
    status: tuple[str, str]
    """Where engine and detokenizer tell how they are."""
    wedge: Path
    """While it exists, no step of the engine's ends."""


@dataclass(frozen=True)
class Fleet:
    replicas: list[Replica]
    clients: list[AsyncClient]
    """Of a router with Redis, and of one without."""
    http: httpx.AsyncClient
    undisturbed: list[str]
    """What a crowd gets while nothing fails."""

    def crowds(self) -> list[Crowd]:
        """Return one for each router."""
        return [Crowd(client, NUM_STREAMS, MAX_TOKENS) for client in self.clients]

    async def wedge_busiest(self) -> Replica | None:
        """Wedge the engine with the most streams, and return its replica. None: all streams have ended before.

        All engines stand still meanwhile, so that no stream ends.
        """
        for replica in self.replicas:
            replica.wedge.touch()
        seen = [each for client in self.clients for each in (await client.list_replicas()).replicas]
        in_flight = {
            replica.address: sum(each.num_in_flight for each in seen if each.address == replica.address)
            for replica in self.replicas
        }
        busiest = max(self.replicas, key=lambda replica: in_flight[replica.address])
        victim = busiest if in_flight[busiest.address] else None
        for replica in self.replicas:
            if replica is not victim:
                replica.wedge.unlink()
        return victim

    async def codes(self, replica: Replica, path: str) -> list[int]:
        return [(await self.http.get(f"http://{address}/{path}")).status_code for address in replica.status]

    async def wait_ready_is(self, replica: Replica, code: int) -> None:
        async def has_become() -> bool:
            return await self.codes(replica, "readyz") == [code, code]

        await _until(has_become)

    async def wait_left(self, replica: Replica) -> None:
        """Wait until no router sends a replica anything new."""

        async def has_been_left() -> bool:
            return all([await _is_stalled(client, replica) for client in self.clients])

        await _until(has_been_left)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("wedge")
    model = _save_model(folder / "model")
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder / "redis"))
        replicas = [
            await stack.enter_async_context(_replica(folder, f"r{number}", model, redis.url))
            for number in range(NUM_REPLICAS)
        ]
        tokenizer = f"unix:{folder}/tokenizer.sock"
        await stack.enter_async_context(
            running("tokenizer", f"--listen={tokenizer}", f"--model={model}", log=folder / "tokenizer.log")
        )
        known = [f"--tokenizer={tokenizer}", *(f"--replicas={replica.address}" for replica in replicas)]
        routers = {"indexed": [*known, f"--redis={redis.url}"], "plain": known}
        for name, flags in routers.items():
            router = running("router", f"--listen=unix:{folder}/{name}.sock", *flags, log=folder / f"{name}.log")
            await stack.enter_async_context(router)
        for name in routers:
            await wait_until_serving(f"unix:{folder}/{name}.sock")
        clients = [
            await stack.enter_async_context(AsyncClient(f"unix:{folder}/{name}.sock", retry=NO_HELP))
            for name in routers
        ]
        for client in clients:
            await wait_ready(client, NUM_REPLICAS)
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=PATIENCE_S))
        yield Fleet(replicas, clients, http, await Crowd(clients[0], NUM_STREAMS, MAX_TOKENS).run())


def _save_model(folder: Path) -> Path:
    tokenizer = byte_level()
    save(tokenizer, folder)
    save_tiny(folder, vocab_size=tokenizer.get_vocab_size())
    return folder


@asynccontextmanager
async def _replica(folder: Path, name: str, model: Path, redis: str) -> AsyncIterator[Replica]:
    address, engine, wedge = f"unix:{folder}/{name}.sock", f"unix:{folder}/{name}-engine.sock", folder / f"{name}-wedge"
    status = status_address(), status_address()
    flags = [f"--listen={engine}", f"--model={model}", "--num-blocks=256", "--num-threads=1", "--drain-delay-s=0"]
    flags += [f"--redis={redis}", f"--advertise={address}", f"--replica-id={name}", f"--status-listen={status[0]}"]
    front = [f"--listen={address}", f"--engine={engine}", f"--model={model}", f"--status-listen={status[1]}"]
    async with (
        running_python("-P", ENGINE, str(wedge), *flags, log=folder / f"{name}-engine.log") as process,
        running("detokenizer", *front, log=folder / f"{name}.log"),
    ):
        yield Replica(address, process, status, wedge)


async def test_wedged_engine_is_left_by_all_and_loses_nothing_when_it_goes_on(fleet: Fleet) -> None:
    """G02."""
    async with _wedged(fleet) as (victim, crowds, texts):
        assert await fleet.codes(victim, "healthz") == [200, 200]
        newcomers = [Crowd(client, NUM_NEWCOMERS) for client in fleet.clients]
        indexed, plain = await asyncio.gather(*(crowd.run() for crowd in newcomers))
        assert indexed == plain
        assert not texts.done()
        victim.wedge.unlink()
        await fleet.wait_ready_is(victim, 200)
        assert await texts == [fleet.undisturbed] * 2
        assert [crowd.num_moves for crowd in crowds + newcomers] == [0] * 4


async def test_streams_of_a_wedged_engine_that_is_killed_go_on_elsewhere(fleet: Fleet) -> None:
    async with _wedged(fleet) as (victim, crowds, texts):
        victim.engine.kill()
        assert await texts == [fleet.undisturbed] * 2
        assert sum(crowd.num_moves for crowd in crowds) > 0


@asynccontextmanager
async def _wedged(fleet: Fleet) -> AsyncIterator[tuple[Replica, list[Crowd], asyncio.Future[list[list[str]]]]]:
    """Wedge an engine in the middle of streams, until it and all routers know. Yields its replica and the streams."""
    for client in fleet.clients:
        await wait_ready(client, NUM_REPLICAS)
    victim = None
    while victim is None:
        crowds = fleet.crowds()
        texts = asyncio.gather(*(crowd.run() for crowd in crowds))
        for crowd in crowds:
            await crowd.under_way.wait()
        victim = await fleet.wedge_busiest()
    wedged_at = time.monotonic()
    try:
        await fleet.wait_ready_is(victim, 503)
        unready_s = time.monotonic() - wedged_at
        await fleet.wait_left(victim)
        left_s = time.monotonic() - wedged_at
        print(f"unready {unready_s:.1f} s after the wedge, left by all routers after {left_s:.1f} s")
        yield victim, crowds, texts
    finally:
        victim.wedge.unlink(missing_ok=True)


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def _is_stalled(client: AsyncClient, replica: Replica) -> bool:
    return any(each.stalled for each in (await client.list_replicas()).replicas if each.address == replica.address)
