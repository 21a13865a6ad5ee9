"""The replicas this router knows: what each is, how busy, and whether it can be chosen.

What is known of them only grows: a list and the registry add replicas, and none is forgotten because one of the two
lost it. What a replica says of itself, asked every second, is the truth about it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Set
from contextlib import asynccontextmanager, suppress

import grpc
import structlog

from kvern.services.router.breaker import CircuitBreaker
from kvern.services.router.choice import Candidate
from kvern.services.router.prefills import Prefills
from kvern.services.runtime.channel import open_channel, streaming
from kvern.services.runtime.errors import NotFound, Unavailable
from kvern.services.runtime.redis_index import RegistryEntry
from kvern.services.runtime.stall import STALL_RULE
from kvern.services.runtime.tls import ClientTls
from kvern.v1 import replica_pb2, replica_pb2_grpc, router_pb2

POLL_INTERVAL_S = 1.0
POLL_TIMEOUT_S = 2.0
MIN_BACKOFF_S = 0.05
"""After the first failed poll; doubles with each further one, up to POLL_INTERVAL_S."""

FORGET_AFTER_S = 10.0
"""A replica that nobody lists any more is forgotten when it has not been reached for so long."""

TRUST_S = 5.0
"""How long the registry's word on a step under way counts: an index that is away must not keep replicas out."""

ServeCall = grpc.aio.UnaryStreamCall[replica_pb2.ServeRequest, replica_pb2.ServeResponse]

_log = structlog.get_logger("kvern.router")


class Replica:
    """One replica, as last seen."""

    def __init__(self, address: str, authority: str | None = None, tls: ClientTls | None = None) -> None:
        """authority: what to call it by in place of its address. tls: None calls it without."""
        self.address = address
        self.reachable = False
        """Whether the last poll and every call since have reached it."""
        self.state = replica_pb2.REPLICA_STATE_UNSPECIFIED
        self.engine: replica_pb2.EngineInfo | None = None
        """As last announced: kept while the engine restarts, since the model stays."""
        self.load = replica_pb2.ReplicaLoad()
        self.entry: RegistryEntry | None = None
        """What the registry last said of it; kept when the registry loses it."""
        self.is_listed = False
        """Whether the router was told of it."""
        self.is_registered = False
        """Whether the registry held it when it was last read."""
        self.is_left_out = False
        """Whether it may not be chosen, whatever it says of itself."""
        self.num_in_flight = 0
        """Requests of this router there."""
        self.breaker = CircuitBreaker()
        self.prefills = Prefills()
        self.loaded_at = time.monotonic()
        """When `load` came, by time.monotonic()."""
        self._num_others = 0
        self._tokens_of_others = 0
        self._entry_at = 0.0
        self._unreached_since = time.monotonic()
        self._suspected = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._channel = open_channel(address, authority, tls)
        self._stub = replica_pb2_grpc.ReplicaServiceStub(self._channel)

    @property
    def id(self) -> str:
        """The name it registered under, which outlives its address; its address where it did not."""
        return self.address if self.entry is None else self.entry.replica

    @property
    def index_id(self) -> str:
        """What the index calls it."""
        return self.id

    @property
    def model(self) -> str:
        """The model it serves, by its own word or else by the registry's; empty where neither has said."""
        if self.engine is not None:
            return self.engine.model
        return "" if self.entry is None else self.entry.model

    @property
    def is_ready(self) -> bool:
        return (
            self.reachable
            and self.state == replica_pb2.REPLICA_STATE_READY
            and self.engine is not None
            and not self.is_fenced
            and not self.is_draining
            and not self.is_stalled
            and not self.is_left_out
        )

    @property
    def is_starting(self) -> bool:
        """Whether it will be ready soon, as far as it or its engine's entry in the registry says."""
        is_registered = self.is_registered and self.entry is not None and self.entry.state == "starting"
        return is_registered or (self.reachable and self.state == replica_pb2.REPLICA_STATE_STARTING)

    @property
    def is_fenced(self) -> bool:
        """Whether a later engine has registered than the one it spoke of: that one has ended, or is about to."""
        return self.entry is not None and self.engine is not None and self.entry.epoch > self.engine.epoch

    @property
    def is_draining(self) -> bool:
        """Whether it takes nothing new, by its own word or by its engine's in the registry."""
        if self.state == replica_pb2.REPLICA_STATE_DRAINING:
            return True
        return self.entry is not None and self.entry.state == "draining" and not self._entry_is_outdated

    @property
    def is_stalled(self) -> bool:
        """Whether its engine's step takes so long that something must be wrong, by its own word or the registry's."""
        entry = self.entry
        if self.load.stalled:
            return True
        if entry is None or self._entry_is_outdated or time.monotonic() - self._entry_at > TRUST_S:
            return False
        return STALL_RULE.is_stuck(entry.step_age_s, entry.expected_step_s)

    @property
    def _entry_is_outdated(self) -> bool:
        return self.entry is not None and self.engine is not None and self.entry.epoch < self.engine.epoch

    @property
    def unreached_s(self) -> float:
        """Seconds for which it has not been reached."""
        return 0.0 if self.reachable else time.monotonic() - self._unreached_since

    def serves(self, model: str) -> bool:
        """Whether it can take a request for a model now."""
        return self.is_ready and self.engine is not None and self.engine.model == model

    def may_serve(self, model: str) -> bool:
        """Whether a model is its own, or may turn out to be; an empty name means any."""
        return not model or self.engine is None or self.engine.model == model

    @property
    def candidate(self) -> Candidate:
        # This router's requests count at once, others' as of the last poll.
        return Candidate(
            self.address,
            self.num_in_flight + self._num_others,
            queued_tokens=self.prefills.num_tokens + self._tokens_of_others,
            replica=self.id,
        )

    @property
    def status(self) -> router_pb2.ReplicaStatus:
        return router_pb2.ReplicaStatus(
            address=self.address,
            reachable=self.reachable,
            state=replica_pb2.REPLICA_STATE_DRAINING if self.is_draining else self.state,
            engine=self.engine,
            load=self.load,
            num_in_flight=self.num_in_flight,
            id=self.id,
            listed=self.is_listed,
            registered=self.is_registered,
            stalled=self.is_stalled,
        )

    @asynccontextmanager
    async def serve(
        self, request: replica_pb2.ServeRequest, timeout_s: float | None, metadata: tuple[tuple[str, str], ...] = ()
    ) -> AsyncIterator[ServeCall]:
        """Run a request there. Leaving the block aborts what has not ended."""
        self.num_in_flight += 1
        self._idle.clear()
        try:
            async with streaming(self._stub.Serve(request, timeout=timeout_s, metadata=metadata)) as call:
                yield call
        finally:
            self.num_in_flight -= 1
            if not self.num_in_flight:
                self._idle.set()

    def register(self, entry: RegistryEntry) -> None:
        """Take in what the registry says of it. An earlier engine of the same name has no say any more."""
        if self.entry is None or self.entry.replica != entry.replica or self.entry.epoch <= entry.epoch:
            self.entry, self._entry_at = entry, time.monotonic()

    def suspect(self) -> None:
        """Take it out of the choice after a failed call, until a poll, made at once, says otherwise."""
        self._lose()
        self._suspected.set()

    async def poll(self) -> None:
        """Ask it what it is and how busy, and remember the answer or that none came.

        An answer that a call has failed before is not believed: it may be from before that.
        """
        self._suspected.clear()
        try:
            # While it is away, the call waits for the connection: the replica's return is noticed when it happens.
            info = await self._stub.GetReplicaInfo(
                replica_pb2.GetReplicaInfoRequest(), timeout=POLL_TIMEOUT_S, wait_for_ready=not self.reachable
            )
        except grpc.aio.AioRpcError:
            self._lose()
            return
        if self._suspected.is_set():
            return
        self.reachable = True
        self.state, self.load, self.loaded_at = info.state, info.load, time.monotonic()
        if info.HasField("engine"):
            self.engine = info.engine
        self._num_others = max(0, self.load.num_running + self.load.num_waiting - self.num_in_flight)
        self._tokens_of_others = max(0, self.load.queued_prefill_tokens - self.prefills.num_reported)

    async def set_draining(self, draining: bool) -> None:
        """Tell it to drain, or not to any more, and see what it then says. Raises AioRpcError."""
        await self._stub.SetDraining(replica_pb2.SetDrainingRequest(draining=draining), timeout=POLL_TIMEOUT_S)
        await self.poll()

    async def drop_cache(self) -> None:
        """Let it forget all cached blocks. Raises AioRpcError."""
        await self._stub.DropCache(replica_pb2.DropCacheRequest(), timeout=POLL_TIMEOUT_S)

    async def pause(self, duration_s: float) -> None:
        """Sleep until the next poll is due, which suspicion makes now."""
        with suppress(TimeoutError):
            async with asyncio.timeout(duration_s):
                await self._suspected.wait()

    async def close_when_idle(self) -> None:
        """Let the requests there end, then close the connection."""
        await self._idle.wait()
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    def _lose(self) -> None:
        if self.reachable:
            self.reachable, self._unreached_since = False, time.monotonic()


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
