"""Which addresses the router was told to find replicas at: a list, in which names may stand for several."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Set
from contextlib import suppress

import structlog

from kvern.services.router.replica_table import ReplicaTable

RESOLVE_INTERVAL_S = 5.0
MIN_RESOLVE_INTERVAL_S = 0.5
"""Names are resolved at once when a call has failed, but not more often than this."""

_DNS = "dns:///"

_log = structlog.get_logger("kvern.router")

Resolve = Callable[[str], Awaitable[Set[str]]]


async def resolve(name: str) -> Set[str]:
    """Return the addresses of `host:port`. Raises OSError."""
    host, _, port = name.rpartition(":")
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    return {_joined(str(address[0]), port) for *_, address in found}


def fixed_addresses(replicas: Iterable[str]) -> list[str]:
    """Return those that need no resolving."""
    return [replica for replica in replicas if not replica.startswith(_DNS)]


class Discovery:
    """Keeps a table's listed addresses to what its list means now. Where a name cannot be resolved, to what it last
    meant."""

    def __init__(self, replicas: Iterable[str], table: ReplicaTable, resolve: Resolve = resolve) -> None:
        replicas = list(replicas)
        self._fixed = fixed_addresses(replicas)
        self._names = [replica.removeprefix(_DNS) for replica in replicas if replica.startswith(_DNS)]
        self._found: dict[str, Set[str]] = {}
        self._table = table
        self._resolve = resolve

    async def watch(self) -> None:
        """Resolve names for ever."""
        while self._names:
            for name in self._names:
                await self._look_up(name)
            self._table.set_listed([*self._fixed, *(each for found in self._found.values() for each in found)])
            await asyncio.sleep(MIN_RESOLVE_INTERVAL_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(RESOLVE_INTERVAL_S):
                    await self._table.trouble.wait()
            self._table.trouble.clear()

    async def _look_up(self, name: str) -> None:
        try:
            self._found[name] = await self._resolve(name)
        except OSError as error:
            _log.warning("cannot resolve", name=name, error=str(error))


def _joined(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
