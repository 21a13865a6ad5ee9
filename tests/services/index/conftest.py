"""Every test of the index runs on each kind of server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvern.services.engine import index_writer, replica_index
from kvern.services.router import index_reader
from kvern.services.router.index_reader import IndexReader
from kvern.services.runtime.redis_index import RedisClient, open_redis
from tests.services.index.indexed_pool import new_reader
from tests.services.index.redis_servers import REDIS_ON_PATH, RedisServer, running_cluster

BACKENDS = ["tcp", "unix", "acl", "cluster", *(["system"] if REDIS_ON_PATH else [])]
ACL = ("--user", "kvern", "on", ">a secret/", "~kvern:*", "+@all", "--user", "default", "off")


@pytest.fixture(scope="session", params=BACKENDS)
def redis_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("redis")
    match request.param:
        case "cluster":
            with running_cluster(folder) as nodes:
                yield "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes[:2])
        case "acl":
            with RedisServer(folder, *ACL) as server:
                yield f"redis://kvern:a%20secret%2F@127.0.0.1:{server.port}"
        case "system":
            with RedisServer(folder, executable=str(REDIS_ON_PATH)) as server:
                yield server.url
        case kind:
            with RedisServer(folder) as server:
                yield server.url if kind == "tcp" else f"unix://{server.socket}"


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[RedisClient]:
    """A client of an empty Redis."""
    client = open_redis(redis_url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def reader(redis: RedisClient) -> IndexReader:
    return new_reader(redis)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """One server for a test that breaks it."""
    with RedisServer(tmp_path / "redis") as running:
        yield running


@pytest.fixture(autouse=True)
def _haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests wait for heartbeats; a twentieth of the time will do."""
    monkeypatch.setattr(index_writer, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(index_writer, "RESYNC_JITTER_S", 0.01)
    monkeypatch.setattr(index_reader, "REFRESH_S", 0.05)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is given up makes for one more snapshot, which tests count. No machine is so slow."""
    monkeypatch.setattr(replica_index, "COMMAND_TIMEOUT_S", 60.0)
    monkeypatch.setattr(index_writer, "CLOSE_TIMEOUT_S", 60.0)
    monkeypatch.setattr(index_reader, "REFRESH_TIMEOUT_S", 60.0)
