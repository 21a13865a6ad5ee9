"""Clients for every kind of Redis, from a URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from kvern.services.runtime.redis_index.credentials import (
    TLS_FILES,
    PasswordFile,
    ReloadingConnection,
    ReloadingSentinelConnection,
    check_tls_files,
)

RedisClient = Redis | RedisCluster

DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379


def open_redis(url: str, password_file: Path | None = None) -> RedisClient:
    """Return a client; nothing is connected so far. Replies are bytes.

    url: redis://, rediss:// or unix:// with all that redis-py reads there, such as a password, an ACL user or `db`;
    redis+sentinel://HOST:PORT,HOST:PORT/SERVICE; redis+cluster://HOST:PORT,HOST:PORT; rediss+... for TLS. A user and
    password before the hosts are those of the servers, and of the sentinels too. TLS goes by ?ssl_ca_certs=FILE and,
    for a certificate of our own, &ssl_certfile=FILE&ssl_keyfile=FILE.
    password_file: holds the password in the URL's place. Like those of certificates it is read again when it changes,
    for connections made from then on.
    Raises ValueError for any other URL, UnusableFile.
    """
    parts = urlsplit(url)
    kind, _, topology = parts.scheme.partition("+")
    if kind not in ("redis", "rediss", "unix") or topology not in ("", "sentinel", "cluster"):
        raise ValueError(
            f"redis URL of scheme {parts.scheme!r}: must be redis, rediss, unix, redis+sentinel or redis+cluster, the"
            " last two also as rediss+"
        )
    options = _client_options() | _login(parts, password_file)
    if kind == "rediss":
        check_tls_files(_tls_options(parts))
    if topology == "cluster":
        return _open_cluster(parts, options)
    if topology == "sentinel":
        return _open_sentinel(parts, options)
    return _open_single(parts, options)


def _client_options() -> dict[str, Any]:
    # One retry, at once, on a new connection: a server that restarted has closed all pooled ones. Longer waits are the
    # callers', who have deadlines. No timeout of redis-py's own: it sends within asyncio.wait_for, which before Python
    # 3.12 loses a cancellation that comes with the end of its wait, and a deadline with it. Protocol 2 greets with a
    # password or not at all, which is a round trip less.
    return {"retry": Retry(NoBackoff(), 1), "socket_timeout": None, "protocol": 2, "driver_info": None}


def _login(url: SplitResult, password_file: Path | None) -> dict[str, Any]:
    if password_file is not None:
        return {"credential_provider": PasswordFile(_unquoted(url.username), password_file)}
    return {"username": _unquoted(url.username), "password": _unquoted(url.password)}


def _tls_options(url: SplitResult) -> dict[str, Any]:
    query = parse_qs(url.query)
    return {name: query[name][-1] for name in TLS_FILES if name in query}


def _open_single(url: SplitResult, options: dict[str, Any]) -> Redis:
    # Who logs in is in the options already, and redis-py takes either those or the URL's.
    without_login = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
    client: Redis = Redis.from_url(without_login, **options)
    if url.scheme == "rediss":
        client.connection_pool.connection_class = ReloadingConnection
    return client


def _open_cluster(url: SplitResult, options: dict[str, Any]) -> RedisCluster:
    nodes = [ClusterNode(host, port) for host, port in _hosts(url, DEFAULT_PORT)]
    if url.scheme == "redis+cluster":
        return RedisCluster(startup_nodes=nodes, **options)
    client = RedisCluster(startup_nodes=nodes, ssl=True, **_tls_options(url), **options)
    # It makes nodes of these two, and takes no class of ours.
    client.connection_kwargs["connection_class"] = ReloadingConnection
    for node in client.startup_nodes:
        node.connection_class = ReloadingConnection
    return client


def _open_sentinel(url: SplitResult, options: dict[str, Any]) -> Redis:
    service, _, db = url.path.strip("/").partition("/")
    if not service:
        raise ValueError("redis+sentinel URL without the service's name: redis+sentinel://HOST:PORT/SERVICE")
    has_tls = url.scheme == "rediss+sentinel"
    if has_tls:
        options |= {"ssl": True} | _tls_options(url)
    sentinel = Sentinel(_hosts(url, DEFAULT_SENTINEL_PORT), sentinel_kwargs=options)  # type: ignore[no-untyped-call]
    if has_tls:
        for asked in sentinel.sentinels:
            asked.connection_pool.connection_class = ReloadingConnection
        options |= {"connection_class": ReloadingSentinelConnection}
    primary: Redis = sentinel.master_for(service, db=int(db or 0), **options)
    return primary


def _hosts(url: SplitResult, default_port: int) -> list[tuple[str, int]]:
    hosts = []
    for host in url.netloc.rpartition("@")[2].split(","):
        parts = urlsplit(f"//{host}")
        hosts.append((parts.hostname or "localhost", parts.port or default_port))
    return hosts


def _unquoted(text: str | None) -> str | None:
    return unquote(text) if text else None
