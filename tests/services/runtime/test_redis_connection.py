"""Every kind of URL leads to a client of its kind, with what the URL says."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.connection import Connection, UnixDomainSocketConnection
from redis.asyncio.sentinel import SentinelConnectionPool

from kvern.services.router.settings import RouterSettings
from kvern.services.runtime.redis_index import open_redis
from kvern.services.runtime.redis_index.credentials import PasswordFile, ReloadingConnection
from kvern.services.runtime.settings import SettingsError
from tests.services.certificates import Authority


@pytest.mark.parametrize(
    ("url", "connection_class", "options"),
    [
        ("redis://host", Connection, {"host": "host"}),
        ("redis://:p%40ss@host:7000/2", Connection, {"host": "host", "port": 7000, "db": 2, "password": "p@ss"}),
        ("rediss://user:word@host", ReloadingConnection, {"username": "user", "password": "word"}),
        ("unix:///run/redis.sock?db=1", UnixDomainSocketConnection, {"path": "/run/redis.sock", "db": 1}),
    ],
)
def test_open_redis_of_one_server(url: str, connection_class: type, options: dict[str, object]) -> None:
    client = open_redis(url)
    assert isinstance(client, Redis)
    assert client.connection_pool.connection_class is connection_class
    assert options.items() <= client.connection_pool.connection_kwargs.items()


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_open_redis_of_sentinels(scheme: str) -> None:
    client = open_redis(f"{scheme}+sentinel://user:p%40ss@one:1,two/service/3")
    assert isinstance(client, Redis)
    pool = client.connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    assert pool.service_name == "service"
    assert {"username": "user", "password": "p@ss", "db": 3}.items() <= pool.connection_kwargs.items()
    assert issubclass(pool.connection_class, ReloadingConnection) == (scheme == "rediss")
    asked = [each.connection_pool.connection_kwargs for each in pool.sentinel_manager.sentinels]
    assert [(each["host"], each["port"]) for each in asked] == [("one", 1), ("two", 26379)]


async def test_open_redis_of_a_cluster() -> None:
    client = open_redis("redis+cluster://user:p%40ss@one:1,two")
    assert isinstance(client, RedisCluster)
    nodes = client.nodes_manager.startup_nodes
    assert set(nodes) == {"one:1", "two:6379"}
    assert all(node.connection_kwargs["password"] == "p@ss" for node in nodes.values())


@pytest.mark.parametrize("url", ["rediss://u@one", "rediss+sentinel://u@one/service", "rediss+cluster://u@one"])
async def test_password_and_certificates_come_from_files_with_every_scheme(tmp_path: Path, url: str) -> None:
    password, authority = tmp_path / "password", Authority(tmp_path)
    password.write_text("word\n")
    client = open_redis(f"{url}?ssl_ca_certs={authority.file}", password)
    if isinstance(client, RedisCluster):
        [node] = client.nodes_manager.startup_nodes.values()
        connections = [(node.connection_class, node.connection_kwargs)]
        assert client.nodes_manager.connection_kwargs["connection_class"] is ReloadingConnection
    else:
        pool = client.connection_pool
        pools = [pool]
        if isinstance(pool, SentinelConnectionPool):
            pools += [each.connection_pool for each in pool.sentinel_manager.sentinels]
        connections = [(each.connection_class, each.connection_kwargs) for each in pools]
    for connection_class, options in connections:
        assert issubclass(connection_class, ReloadingConnection)
        assert options["ssl_ca_certs"] == str(authority.file)
        provider = options["credential_provider"]
        assert isinstance(provider, PasswordFile)
        assert await provider.get_credentials_async() == ("u", "word")


@pytest.mark.parametrize("redis", [[], ["--redis=redis://u:secret@host"], ["--redis=rediss+cluster://:secret@a,b"]])
def test_password_file_beside_no_url_or_one_with_a_password_is_refused_without_telling_it(redis: list[str]) -> None:
    flags = ["--listen=unix:/s", "--tokenizer=unix:/t", "--replicas=r:1", *redis, "--redis-password-file=/file"]
    with pytest.raises(SettingsError, match=r"^redis_password_file: ") as refused:
        RouterSettings.load(flags, prog="", environ={})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["http://host", "host:6379", "redis+sentinel://host:1"])
def test_open_redis_of_another_url_raises(url: str) -> None:
    with pytest.raises(ValueError, match="redis"):
        open_redis(url)


def test_no_timeout_of_the_client_gets_between_a_call_and_its_deadline() -> None:
    """redis-py sends within asyncio.wait_for if it has one, which on Python 3.11 can lose a cancellation."""
    client = open_redis("redis://host")
    assert isinstance(client, Redis)
    assert client.connection_pool.connection_kwargs["socket_timeout"] is None
