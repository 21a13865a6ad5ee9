"""One request's way through a replica, or several, back to its client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import grpc
import structlog

from kvern.services.router.attempt import Attempt, ReplicaLost
from kvern.services.router.choice import Candidate
from kvern.services.router.deadline import for_replica
from kvern.services.router.metrics import RequestMetrics
from kvern.services.router.placement import Placement
from kvern.services.router.progress import Progress
from kvern.services.router.race import Race
from kvern.services.router.replica import Replica
from kvern.services.router.replica_table import ReplicaTable
from kvern.services.router.request_log import RequestRecord
from kvern.services.router.retry_budget import RetryBudget
from kvern.services.router.tokenizer import TimeRemaining
from kvern.services.runtime.deadline import check_reachable
from kvern.services.runtime.errors import Internal, Unavailable
from kvern.v1 import replica_pb2

MAX_RETRIES = 2
"""Further replicas tried for one request, none twice, while its client has received nothing."""

MAX_BARREN_STREAMS = 2
"""Streams in a row that broke without a new token. With so many the request itself is taken for the cause."""

MAX_MOVE_S = 60.0
"""How long a stream that broke waits for a replica that takes it up."""

_MOVE_PAUSE_S = 0.1
"""Between looks for one."""

POISON = "POISON"

_log = structlog.get_logger("kvern.router")


@dataclass(frozen=True)
class Repeats:
    """What a router's requests have in common when they are sent more than once."""

    hedge_after_s: float | None = None
    """How long a request waits for output before a second replica is asked as well. None: none ever is."""
    budget: RetryBudget = field(default_factory=RetryBudget)


class Relay:
    """Sends a completed request to the best replica and passes its frames on, nearly all unparsed. When that replica is
    lost another one goes on where the client's stream stands."""

    def __init__(
        self,
        table: ReplicaTable,
        placement: Placement,
        request: replica_pb2.ServeRequest,
        record: RequestRecord,
        repeats: Repeats,
        metrics: RequestMetrics,
    ) -> None:
        self._table = table
        self._placement = placement
        self._request = request
        self._record = record
        self._repeats = repeats
        self._metrics = metrics
        self._arrived_at = time.monotonic()
        self._progress = Progress(request.request)
        self._tried: set[str] = set()
        """Replicas that were asked since one last took the request up."""
        self._contract = ""
        """Of the replica that began the stream."""
        self._num_barren = 0
        self._lost_at = 0.0
        self._was_refused = False

    async def frames(self, time_remaining: TimeRemaining) -> AsyncGenerator[bytes, None]:
        """Yield serialized GenerateResponses until the request has ended.

        Raises Unavailable where no replica can take it, ResourceExhausted where none could in time, Internal where it
        brings down its replicas, AioRpcError with a replica's verdict.
        """
        self._repeats.budget.earn()
        candidate = self._first_candidate(time_remaining())
        while True:
            async with await self._start(candidate, time_remaining) as race:
                try:
                    while (response := await race.read()) is not None:
                        frame = self._take(response, race.leader)
                        if frame is not None:
                            yield frame
                    return
                except ReplicaLost as error:
                    lost = error
                except grpc.aio.AioRpcError as error:
                    candidate = self._after_refusal(error)
                    continue
            if self._progress.is_finished:
                return  # it broke behind its last message
            candidate = await self._after_loss(race, lost)

    def _take(self, response: replica_pb2.ServeResponse, attempt: Attempt) -> bytes | None:
        self._record.replica = attempt.replica.address
        if not self._progress.has_output:
            self._contract = _contract(attempt.replica)
            if response.HasField("cached_tokens"):
                predicted = self._placement.predicted_tokens(attempt.replica.address)
                self._metrics.schedule(self._record.prompt_tokens, response.cached_tokens, predicted)
        if response.updates:
            self._metrics.take(response.updates)
        return self._progress.take(response, attempt.source)

    def _first_candidate(self, remaining_s: float | None) -> Candidate:
        candidates = self._placement.ranked()
        check_reachable(min(self._table[each.address].load.predicted_wait_s for each in candidates), remaining_s)
        return candidates[0]

    async def _start(self, candidate: Candidate, time_remaining: TimeRemaining) -> Race:
        async def hedge() -> Attempt | None:
            if not self._has_another() or not self._may_repeat():
                return None
            return await self._open(self._another(), time_remaining)

        self._record.replica = candidate.address
        self._request.age_s = time.monotonic() - self._arrived_at
        if self._progress.has_begun:
            self._request.moved = True
            self._request.request.resume.CopyFrom(self._progress.resume)
        first = await self._open(candidate, time_remaining)
        self._progress.open(first.source)
        self._metrics.set_replica(True)
        hedge_after_s = None if self._progress.has_output else self._repeats.hedge_after_s
        return Race(first, hedge, hedge_after_s, self._metrics.router.count_hedge)

    async def _open(self, candidate: Candidate, time_remaining: TimeRemaining) -> Attempt:
        self._tried.add(candidate.address)
        attempt = Attempt(self._table, self._placement, candidate, self._request)
        self._record.sources.append(attempt.source)
        await attempt.open(for_replica(time_remaining()), self._record.num_moves)
        return attempt

    def _has_another(self) -> bool:
        return bool(self._table.ready(self._placement.model, self._without))

    def _another(self) -> Candidate:
        return self._placement.ranked(self._without)[0]

    @property
    def _without(self) -> set[str]:
        """Replicas that are not to be asked: those tried, and, once a stream has begun, those of other weights."""
        if not self._progress.has_begun:
            return self._tried
        return self._tried | {replica.address for replica in self._table if _contract(replica) != self._contract}

    def _after_refusal(self, error: grpc.aio.AioRpcError) -> Candidate:
        """Return who may have room where one replica had none. Raises the error if it stands."""
        is_full = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and not self._progress.has_begun
        if not is_full or self._was_refused or not self._has_another() or not self._may_repeat():
            raise error
        self._was_refused = True
        self._metrics.router.retries.inc()
        return self._another()

    async def _after_loss(self, race: Race, lost: ReplicaLost) -> Candidate:
        """Return who takes the request up. Raises Unavailable if nobody does, Internal if nobody shall."""
        self._metrics.set_replica(False)
        self._count_barren(race)
        if self._progress.has_begun:
            return await self._find_another(race, lost)
        if len(self._tried) > MAX_RETRIES or not self._has_another() or not self._may_repeat():
            raise Unavailable(str(lost)) from lost
        self._metrics.router.retries.inc()
        return self._another()

    def _may_repeat(self) -> bool:
        """Take what one more try costs from the budget, if it is there."""
        has_spent = self._repeats.budget.spend()
        if not has_spent:
            self._metrics.router.retries_refused.inc()
        return has_spent

    def _count_barren(self, race: Race) -> None:
        if any(attempt.source.num_tokens for attempt in race.lost):
            self._num_barren = 0
        else:
            self._num_barren += sum(attempt.has_begun for attempt in race.lost)
        if self._num_barren >= MAX_BARREN_STREAMS:
            self._metrics.router.poisoned.inc()
            raise Internal("replicas keep failing at this request", reason=POISON)

    async def _find_another(self, race: Race, lost: ReplicaLost) -> Candidate:
        """Wait for a replica that is ready, one that did not just fail if there is one."""
        if any(attempt.has_begun for attempt in race.lost):
            self._record.num_moves += 1
            self._metrics.move(lost.reason)
            self._lost_at = time.monotonic()
            self._tried = {attempt.replica.address for attempt in race.lost}
        while not self._has_another():
            if time.monotonic() - self._lost_at > MAX_MOVE_S:
                raise Unavailable(str(lost)) from lost
            self._tried.clear()
            await asyncio.sleep(_MOVE_PAUSE_S)
        return self._another()


def _contract(replica: Replica) -> str:
    return "" if replica.engine is None else replica.engine.contract
