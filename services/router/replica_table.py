"""The replicas that this router knows.

What is known of them only grows: a list and the registry add replicas, and none is forgotten because one of the two
lost it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress

import structlog

from kvern.services.router.choice import Candidate
from kvern.services.router.replica import Replica
from kvern.services.runtime.errors import NotFound, Unavailable
from kvern.services.runtime.redis_index import RegistryEntry
from kvern.services.runtime.tls import ClientTls

POLL_INTERVAL_S = 1.0
MIN_BACKOFF_S = 0.05
"""After the first failed poll; doubles with each further one, up to POLL_INTERVAL_S."""

FORGET_AFTER_S = 10.0
"""A replica that nobody lists any more is forgotten when it has not been reached for so long."""

_log = structlog.get_logger("kvern.router")


class ReplicaTable:
    """All replicas by address. `watch` keeps it true; `on_change` is called after every poll."""

    def __init__(
        self,
        addresses: Iterable[str],
        on_change: Callable[[], None],
        authority: str | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        """authority: what to call replicas by in place of their addresses. tls: None calls them without."""
        self._authority = authority
        self._tls = tls
        self._replicas: dict[str, Replica] = {}
        self._tell = on_change
        self._changed = asyncio.Event()
        self._watchers: asyncio.TaskGroup | None = None
        self.allows: Callable[[Replica], bool] = lambda _: True
        """Asked after each poll whether a replica may be chosen."""
        self.trouble = asyncio.Event()
        """Set when a call to a replica has failed: lists of replicas may have changed."""
        self.set_listed(addresses)

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._replicas.values()))

    def __getitem__(self, address: str) -> Replica:
        return self._replicas[address]

    def _on_change(self) -> None:
        self._tell()
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_while_starting(self, model: str, limit_s: float) -> None:
        """Wait as long as no replica of a model is ready and one is starting, at most `limit_s` seconds.

        An empty name means any model.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._is_starting(model):
                    await self._changed.wait()

    def _is_starting(self, model: str) -> bool:
        if any(replica.is_ready and replica.may_serve(model) for replica in self):
            return False
        return any(replica.is_starting and replica.may_serve(model) for replica in self)

    @property
    def has_ready(self) -> bool:
        return any(replica.is_ready for replica in self)

    @property
    def is_whole(self) -> bool:
        """Whether every replica can be chosen."""
        return bool(self._replicas) and all(replica.is_ready for replica in self)

    def ready(self, model: str, without: Set[str] = frozenset()) -> list[Replica]:
        """Return the replicas that can take a request for a model, addresses in `without` left out."""
        ready = [replica for replica in self if replica.serves(model) and replica.address not in without]
        now = time.monotonic()
        # Where every circuit is open, a try costs less than to be sure of a failure.
        return [replica for replica in ready if replica.breaker.allows(now)] or ready

    def candidates(self, model: str, without: Set[str] = frozenset()) -> list[Candidate]:
        """Return who can take a request for a model, addresses in `without` left out. Raises Unavailable if nobody."""
        ready = self.ready(model, without)
        if not ready:
            raise Unavailable(f"no replica of {model!r} is ready")
        return [replica.candidate for replica in ready]

    def find(self, name: str) -> Replica:
        """Return a replica by its id or address. Raises NotFound."""
        for replica in self:
            if name in (replica.id, replica.address):
                return replica
        raise NotFound("no replica of this id or address is known here", reason="REPLICA_NOT_FOUND")

    def set_listed(self, addresses: Iterable[str]) -> None:
        """Take in the addresses that the router was told of. One that is not among them any more stays while it can be
        reached."""
        listed = set(addresses)
        for address in sorted(listed - self._replicas.keys()):
            self._add(address)
        for replica in self:
            replica.is_listed = replica.address in listed

    def set_registered(self, entries: Mapping[str, RegistryEntry]) -> None:
        """Take in what the registry holds, by replica id. One that is missing stays while it can be reached."""
        for entry in sorted(entries.values(), key=lambda entry: entry.epoch):
            self._register(entry)
        registered = {entry.address for entry in entries.values()}
        for replica in self:
            replica.is_registered = replica.address in registered
        self._on_change()

    async def watch(self) -> None:
        """Poll every replica for ever."""
        async with asyncio.TaskGroup() as self._watchers:
            for replica in self:
                self._watchers.create_task(self._watch(replica))
            await asyncio.Event().wait()

    def suspect(self, replica: Replica) -> None:
        """Take a replica out of the choice after a failed call, until a poll, made at once, says otherwise."""
        replica.suspect()
        self.trouble.set()
        self._on_change()

    async def close(self) -> None:
        for replica in self:
            await replica.close()

    def _register(self, entry: RegistryEntry) -> None:
        for other in self:
            if other.id == entry.replica and other.address != entry.address and other.entry is not None:
                if other.entry.epoch > entry.epoch:
                    return  # the entry is of an engine that was replaced
                self._replace(other)
        if entry.address not in self._replicas:
            if entry.state == "draining":
                return
            self._add(entry.address)
        self._replicas[entry.address].register(entry)

    def _replace(self, replica: Replica) -> None:
        """Let go of a replica whose name a later engine has at another address."""
        replica.entry = None
        if not replica.is_listed:
            self._forget(replica, "replaced")

    def _add(self, address: str) -> None:
        _log.info("replica found", replica=address)
        replica = self._replicas[address] = Replica(address, self._authority, self._tls)
        if self._watchers is not None:
            self._watchers.create_task(self._watch(replica))

    def _knows(self, replica: Replica) -> bool:
        return self._replicas.get(replica.address) is replica

    def _forget(self, replica: Replica, reason: str) -> None:
        _log.info("replica forgotten", replica=replica.address, reason=reason)
        del self._replicas[replica.address]
        replica.suspect()  # wakes its watcher, which sees that it is forgotten

    async def _watch(self, replica: Replica) -> None:
        backoff_s = MIN_BACKOFF_S
        while self._knows(replica):
            await replica.poll()
            replica.is_left_out = not self.allows(replica)
            self._forget_if_gone(replica)
            self._on_change()
            backoff_s = MIN_BACKOFF_S if replica.reachable else min(2 * backoff_s, POLL_INTERVAL_S)
            await replica.pause(POLL_INTERVAL_S if replica.reachable else backoff_s)
        await replica.close_when_idle()

    def _forget_if_gone(self, replica: Replica) -> None:
        if replica.reachable or replica.is_listed or not self._knows(replica):
            return
        if replica.is_draining:
            self._forget(replica, "drained")
        elif not replica.is_registered and replica.unreached_s > FORGET_AFTER_S:
            self._forget(replica, "unreachable and listed nowhere")
