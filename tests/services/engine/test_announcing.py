"""An engine process that tells a real Redis what it is and what it holds."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from kvern.engine.block_hash import extend_digests, root_digest
from kvern.services.engine.index_delta import Position
from kvern.services.engine.replica_index import ReplicaIndex
from kvern.services.router.index_reader import IndexReader
from kvern.services.runtime.redis_index import RedisClient, RegistryEntry, open_redis
from kvern.services.runtime.redis_index.keys import ReplicaKeys, home_shard
from tests.services.index.indexed_pool import new_reader
from tests.services.index.redis_servers import RedisServer
from tests.services.processes import running
from tests.up_process import PATIENCE_S

from .test_engine_service import COMMAND, connect

ADDRESS = "10.0.0.1:50052"
PROMPT = list(range(1000, 1050))
BLOCK_SIZE = 16


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as running_server:
        yield running_server


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[RedisClient]:
    client = open_redis(server.url)
    yield client
    await client.aclose()


async def until(reader: IndexReader, is_right: Callable[[RegistryEntry | None], bool]) -> RegistryEntry | None:
    """Wait until the registry says so of replica-0."""
    async with asyncio.timeout(60):
        while True:
            entry = (await reader.refresh()).get("replica-0")
            if is_right(entry):
                return entry
            await asyncio.sleep(0.02)


def flags(socket: str, server: RedisServer) -> list[str]:
    return [
        *("--listen", socket, "--num-blocks", "40", "--max-model-len", "256", "--num-threads", "1"),
        *("--redis", server.url, "--advertise", ADDRESS, "--replica-id", "replica-0"),
    ]


async def test_engine_is_registered_from_its_start_and_indexed_until_it_ends(
    tmp_path: Path, server: RedisServer, redis: RedisClient
) -> None:
    """F22: a replica that starts says so. One that drains says so at once, and leaves nothing."""
    reader, socket = new_reader(redis), f"unix:{tmp_path}/engine.sock"
    async with running("engine", *flags(socket, server), log=tmp_path / "log") as process:
        starting = await until(reader, lambda entry: entry is not None and entry.state == "starting")
        async with connect(socket) as (connection, hello):
            entry = await until(reader, lambda entry: entry is not None and entry.state == "ready")
            assert entry is not None
            assert starting is not None
            assert (entry.address, entry.epoch, entry.num_blocks) == (ADDRESS, starting.epoch, 40)
            assert (entry.contract, entry.epoch) == (hello.info.contract, hello.info.epoch)
            await connection.add(1, PROMPT, 4, temperature=0)
            await connection.read_until_ended(1)
            digests = extend_digests(root_digest(entry.contract), PROMPT, BLOCK_SIZE)
            async with asyncio.timeout(20):
                while await reader.match(entry.model, entry.contract, b"".join(digests), 1.0) != {"replica-0": 3}:
                    await reader.refresh()
            process.terminate()  # which waits for the stream to end
            await until(reader, lambda entry: entry is not None and entry.state == "draining")
        assert await process.wait() == 0
    assert await reader.refresh() == {}


async def test_engine_whose_later_start_is_registered_ends_and_says_why(
    tmp_path: Path, server: RedisServer, redis: RedisClient
) -> None:
    """F02."""
    later = RegistryEntry("replica-0", ADDRESS, 2**63, "smollm2", "", BLOCK_SIZE, 0, 0, "ready")
    keys = ReplicaKeys.of(home_shard(later, 1), later.replica, later.epoch)
    await ReplicaIndex(redis).heartbeat(keys, later, Position(0, 0, 0))
    async with running("engine", *flags(f"unix:{tmp_path}/engine.sock", server), log=tmp_path / "log") as process:
        assert await process.wait() == 1
    [reason] = [line for line in (tmp_path / "log").read_text().splitlines() if '"level": "critical"' in line]
    assert "a later start of this replica is registered" in reason


async def test_engine_serves_while_there_is_no_redis(tmp_path: Path, server: RedisServer) -> None:
    server.kill()
    socket = f"unix:{tmp_path}/engine.sock"
    async with running("engine", *flags(socket, server), log=tmp_path / "log") as process:
        async with connect(socket) as (connection, _):
            await connection.add(1, PROMPT, 4, temperature=0)
            await connection.read_until_ended(1)
        process.terminate()
        assert await process.wait() == 0
    assert "redis does not answer" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--redis", "redis://127.0.0.1:1"], "advertise: Value error, must be given with redis"),
        (
            ["--redis", "http://127.0.0.1:1", "--advertise", ADDRESS],
            "redis: Value error, must begin with one of redis://",
        ),
    ],
)
def test_engine_with_half_an_announcement_names_what_is_wrong(tmp_path: Path, given: list[str], said: str) -> None:
    command = [*COMMAND, "--listen", f"unix:{tmp_path}/engine.sock", *given]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 2
    assert said in ended.stderr
