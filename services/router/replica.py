"""A replica as this router knows it: what it is, how busy, and whether it can be chosen.

What it says of itself, asked every second, is the truth about it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc

from kvern.services.router.breaker import CircuitBreaker
from kvern.services.router.choice import Candidate
from kvern.services.router.prefills import Prefills
from kvern.services.runtime.channel import open_channel, streaming
from kvern.services.runtime.redis_index import RegistryEntry
from kvern.services.runtime.stall import STALL_RULE
from kvern.services.runtime.tls import ClientTls
from kvern.v1 import replica_pb2, replica_pb2_grpc, router_pb2

POLL_TIMEOUT_S = 2.0

TRUST_S = 5.0
"""How long the registry's word on a step under way counts: an index that is away must not keep replicas out."""

ServeCall = grpc.aio.UnaryStreamCall[replica_pb2.ServeRequest, replica_pb2.ServeResponse]


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
        self._num_suspicions = 0
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
        self._num_suspicions += 1
        self._suspected.set()

    async def poll(self) -> None:
        """Ask it what it is and how busy, and remember the answer or that none came.

        Where a call fails meanwhile, the answer is not believed: it may be from before that.
        """
        suspicions = self._num_suspicions
        try:
            # While it is away, the call waits for the connection: the replica's return is noticed when it happens.
            info = await self._stub.GetReplicaInfo(
                replica_pb2.GetReplicaInfoRequest(), timeout=POLL_TIMEOUT_S, wait_for_ready=not self.reachable
            )
        except grpc.aio.AioRpcError:
            self._lose()
            return
        if self._num_suspicions != suspicions:
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
        self._suspected.clear()

    async def close_when_idle(self) -> None:
        """Let the requests there end, then close the connection."""
        await self._idle.wait()
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    def _lose(self) -> None:
        if self.reachable:
            self.reachable, self._unreached_since = False, time.monotonic()
