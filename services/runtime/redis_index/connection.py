"""Clients for every kind of Redis, from a URL."""

from __future__ import annotations

from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

RedisClient = Redis | RedisCluster

DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379


def open_redis(url: str) -> RedisClient:
    """Return a client; nothing is connected so far. Replies are bytes.

    url: redis://, rediss:// or unix:// with all that redis-py reads there, such as a password, an ACL user or `db`;
    redis+sentinel://HOST:PORT,HOST:PORT/SERVICE; redis+cluster://HOST:PORT,HOST:PORT; rediss+... for TLS. A user and
    password before the hosts are those of the servers, and of the sentinels too.
    Raises ValueError for anything else.
    """
    scheme = urlsplit(url).scheme
    if scheme in ("redis", "rediss", "unix"):
        return Redis.from_url(url, **_client_options())
    if scheme in ("redis+cluster", "rediss+cluster"):
        return _open_cluster(urlsplit(url))
    if scheme in ("redis+sentinel", "rediss+sentinel"):
        return _open_sentinel(urlsplit(url))
    raise ValueError(
        f"redis URL of scheme {scheme!r}: redis, rediss, unix, redis+sentinel and redis+cluster are understood"
    )


def _client_options() -> dict[str, Any]:
    # One retry, at once, on a new connection: a server that restarted has closed all pooled ones. Longer waits are the
    # callers', who have deadlines. No timeout of redis-py's own: it sends within asyncio.wait_for, which before Python
    # 3.12 loses a cancellation that comes with the end of its wait, and a deadline with it. Protocol 2 greets with a
    # password or not at all, which is a round trip less.
    return {"retry": Retry(NoBackoff(), 1), "socket_timeout": None, "protocol": 2, "driver_info": None}


def _open_cluster(url: SplitResult) -> RedisCluster:
    nodes = [ClusterNode(host, port) for host, port in _hosts(url, DEFAULT_PORT)]
    return RedisCluster(
        startup_nodes=nodes,
        username=_unquoted(url.username),
        password=_unquoted(url.password),
        ssl=url.scheme.startswith("rediss"),
        **_client_options(),
    )


def _open_sentinel(url: SplitResult) -> Redis:
    service, _, db = url.path.strip("/").partition("/")
    if not service:
        raise ValueError("redis+sentinel URL without the service's name: redis+sentinel://HOST:PORT/SERVICE")
    options: dict[str, Any] = {
        "username": _unquoted(url.username),
        "password": _unquoted(url.password),
        "ssl": url.scheme.startswith("rediss"),
        **_client_options(),
    }
    sentinel = Sentinel(_hosts(url, DEFAULT_SENTINEL_PORT), sentinel_kwargs=options)  # type: ignore[no-untyped-call]
    primary: Redis = sentinel.master_for(service, db=int(db or 0), **options)
    return primary


def _hosts(url: SplitResult, default_port: int) -> list[tuple[str, int]]:
    hosts = []
    for host in url.netloc.rpartition("@")[2].split(","):
        parts = urlsplit(f"//{host}")
        hosts.append((parts.hostname or "localhost", parts.port or default_port))
    return hosts


def _unquoted(text: str | None) -> str | None:
    return None if text is None else unquote(text)
