"""The replicas this router knows: what each is, how busy, and whether it can be chosen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Set
from contextlib import asynccontextmanager, suppress

import grpc

from kvern.services.router.choice import Candidate
from kvern.services.runtime.channel import open_channel, streaming
from kvern.services.runtime.errors import Unavailable
from kvern.v1 import replica_pb2, replica_pb2_grpc, router_pb2

POLL_INTERVAL_S = 1.0
POLL_TIMEOUT_S = 2.0
MIN_BACKOFF_S = 0.05
"""After the first failed poll; doubles with each further one, up to POLL_INTERVAL_S."""

ServeCall = grpc.aio.UnaryStreamCall[replica_pb2.ServeRequest, replica_pb2.ServeResponse]


class Replica:
    """One replica, as last seen."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.reachable = False
        """Whether the last poll and every call since have reached it."""
        self.state = replica_pb2.REPLICA_STATE_UNSPECIFIED
        self.engine: replica_pb2.EngineInfo | None = None
        """As last announced: kept while the engine restarts, since the model stays."""
        self.load = replica_pb2.ReplicaLoad()
        self.num_in_flight = 0
        """Requests of this router there."""
        self._num_others = 0
        self._suspected = asyncio.Event()
        self._channel = open_channel(address)
        self._stub = replica_pb2_grpc.ReplicaServiceStub(self._channel)

    @property
    def is_ready(self) -> bool:
        return self.reachable and self.state == replica_pb2.REPLICA_STATE_READY and self.engine is not None

    def serves(self, model: str) -> bool:
        """Whether it can take a request for a model now."""
        return self.is_ready and self.engine is not None and self.engine.model == model

    @property
    def candidate(self) -> Candidate:
        # This router's requests count at once, others' as of the last poll.
        return Candidate(self.address, self.num_in_flight + self._num_others)

    @property
    def status(self) -> router_pb2.ReplicaStatus:
        return router_pb2.ReplicaStatus(
            address=self.address,
            reachable=self.reachable,
            state=self.state,
            engine=self.engine,
            load=self.load,
            num_in_flight=self.num_in_flight,
        )

    @asynccontextmanager
    async def serve(self, request: replica_pb2.ServeRequest, timeout_s: float | None) -> AsyncIterator[ServeCall]:
        """Run a request there. Leaving the block aborts what has not ended."""
        self.num_in_flight += 1
        try:
            async with streaming(self._stub.Serve(request, timeout=timeout_s)) as call:
                yield call
        finally:
            self.num_in_flight -= 1

    def suspect(self) -> None:
        """Take it out of the choice after a failed call, until a poll, made at once, says otherwise."""
        self.reachable = False
        self._suspected.set()

    async def poll(self) -> None:
        """Ask it what it is and how busy, and remember the answer or that none came."""
        try:
            # While it is away, the call waits for the connection: the replica's return is noticed when it happens.
            info = await self._stub.GetReplicaInfo(
                replica_pb2.GetReplicaInfoRequest(), timeout=POLL_TIMEOUT_S, wait_for_ready=not self.reachable
            )
        except grpc.aio.AioRpcError:
            self.reachable = False
            return
        self.reachable = True
        self.state, self.load = info.state, info.load
        if info.HasField("engine"):
            self.engine = info.engine
        self._num_others = max(0, self.load.num_running + self.load.num_waiting - self.num_in_flight)

    async def pause(self, duration_s: float) -> None:
        """Sleep until the next poll is due, which suspicion makes now."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._suspected.wait(), duration_s)
        self._suspected.clear()

    async def close(self) -> None:
        await self._channel.close()


class ReplicaTable:
    """All replicas by address. `watch` keeps it true; `on_change` is called after every poll."""

    def __init__(self, addresses: Iterable[str], on_change: Callable[[], None]) -> None:
        self._replicas = {address: Replica(address) for address in addresses}
        self._on_change = on_change

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __getitem__(self, address: str) -> Replica:
        return self._replicas[address]

    @property
    def has_ready(self) -> bool:
        return any(replica.is_ready for replica in self)

    def ready(self, model: str, without: Set[str] = frozenset()) -> list[Replica]:
        """Return the replicas that can take a request for a model, addresses in `without` left out."""
        return [replica for replica in self if replica.serves(model) and replica.address not in without]

    def candidates(self, model: str, without: Set[str] = frozenset()) -> list[Candidate]:
        """Return who can take a request for a model, addresses in `without` left out. Raises Unavailable if nobody."""
        ready = self.ready(model, without)
        if not ready:
            raise Unavailable(f"no replica of {model!r} is ready")
        return [replica.candidate for replica in ready]

    async def watch(self) -> None:
        """Poll every replica for ever."""
        async with asyncio.TaskGroup() as tasks:
            for replica in self:
                tasks.create_task(self._watch(replica))

    async def _watch(self, replica: Replica) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            await replica.poll()
            self._on_change()
            backoff_s = MIN_BACKOFF_S if replica.reachable else min(2 * backoff_s, POLL_INTERVAL_S)
            await replica.pause(POLL_INTERVAL_S if replica.reachable else backoff_s)

    def suspect(self, replica: Replica) -> None:
        """Take a replica out of the choice after a failed call, until a poll, made at once, says otherwise."""
        replica.suspect()
        self._on_change()

    async def close(self) -> None:
        for replica in self:
            await replica.close()
