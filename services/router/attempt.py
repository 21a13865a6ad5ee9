"""One try of a request at one replica."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import grpc
import structlog

from kvern.services.router.choice import Candidate
from kvern.services.router.metrics import MoveReason
from kvern.services.router.placement import Placement
from kvern.services.router.progress import Source
from kvern.services.router.replica_table import ReplicaTable
from kvern.services.runtime.interceptors import reason_of
from kvern.services.runtime.tracing import current_span
from kvern.v1 import replica_pb2

SERVICE = "kvern.v1.ReplicaService"

DRAINING = "DRAINING"
"""ErrorInfo.reason of a replica that sends its streams elsewhere."""

_LOSSES = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
_FAULTS = _LOSSES | {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}

_log = structlog.get_logger("kvern.router")


class ReplicaLost(Exception):
    """The replica cannot go on with a call: it is gone, its engine is, or it drains. Another one can."""

    def __init__(self, message: str, reason: MoveReason) -> None:
        super().__init__(message)
        self.reason = reason


class Attempt:
    """A call to a replica, opened and closed by who uses it."""

    def __init__(
        self, table: ReplicaTable, placement: Placement, candidate: Candidate, request: replica_pb2.ServeRequest
    ) -> None:
        self.replica = table[candidate.address]
        self.source = Source(time.monotonic())
        self.has_begun = False
        """Whether the replica has answered."""
        self._table = table
        self._request = request
        self._stack = AsyncExitStack()
        self._sent = self._stack.enter_context(placement.sending(candidate))
        self._code = grpc.StatusCode.CANCELLED
        """What came of the call: it is ended from here as long as it has not ended."""

    async def open(self, timeout_s: float | None, num_moves: int) -> None:
        """Send the request. `num_moves`: streams before this one that broke."""
        self.source.num_moves = num_moves
        if self.replica.breaker.begin():
            self._stack.callback(self.replica.breaker.give_up)
        self._begin_span()
        serving = self.replica.serve(self._request, timeout_s, self._span.metadata)
        call = await self._stack.enter_async_context(serving)
        self._responses = aiter(call)

    async def close(self) -> None:
        """Abort what has not ended."""
        await self._stack.aclose()
        self._end_span()

    async def read(self) -> replica_pb2.ServeResponse | None:
        """Return the next message, None at the end. Raises ReplicaLost, AioRpcError with the replica's verdict."""
        try:
            response = await anext(self._responses, None)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            # grpc raises this also where the replica alone has cancelled the call.
            raise self._lost("the call was cancelled there", MoveReason.OTHER) from None
        except grpc.aio.AioRpcError as error:
            self._code = error.code()
            if error.code() in _LOSSES:
                raise self._lost(error.details() or error.code().name, _reason_of(error)) from error
            if error.code() in _FAULTS:
                self._fail()
            raise
        if not self.has_begun:
            self.has_begun = True
            self.replica.breaker.succeed()
        if response is None:
            self._code = grpc.StatusCode.OK
        elif not self._sent.is_computed:
            self._sent.take(response)
        return response

    def _begin_span(self) -> None:
        self._span = current_span().call(f"{SERVICE}/Serve")
        if self._span.is_recording:
            candidate = self._sent.candidate
            self._span.set(
                {
                    "kvern.replica": candidate.address,
                    "kvern.predicted_cached_tokens": candidate.matched_tokens,
                    "kvern.moved": self._request.moved,
                }
            )

    def _end_span(self) -> None:
        if self._span.is_recording:
            self._span.set({"gen_ai.usage.output_tokens": self.source.num_tokens})
            if self._sent.cached_tokens is not None:
                self._span.set({"gen_ai.usage.cache_read.input_tokens": self._sent.cached_tokens})
        self._span.end(self._code)

    def _lost(self, details: str, reason: MoveReason) -> ReplicaLost:
        if self.replica.is_stalled and reason is not MoveReason.DRAINED:
            reason = MoveReason.STALLED
        _log.warning("replica lost", replica=self.replica.address, details=details, num_tokens=self.source.num_tokens)
        self._fail()
        self._table.suspect(self.replica)
        return ReplicaLost(f"replica {self.replica.address} failed: {details}", reason)

    def _fail(self) -> None:
        self.replica.breaker.fail(self.source.opened_at, time.monotonic())


def _reason_of(error: grpc.aio.AioRpcError) -> MoveReason:
    if reason_of(error) == DRAINING:
        return MoveReason.DRAINED
    return MoveReason.UNAVAILABLE if error.code() is grpc.StatusCode.UNAVAILABLE else MoveReason.OTHER
