"""One request's way through a replica, or several, back to its client."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Set

import grpc
import structlog

from kvern.services.router.choice import by_cost
from kvern.services.router.replicas import Replica, ReplicaTable
from kvern.services.router.request_log import RequestRecord
from kvern.services.router.tokenizer import TimeRemaining
from kvern.services.runtime.errors import Unavailable
from kvern.v1 import replica_pb2

MAX_RETRIES = 2
"""Further replicas tried for one request, none twice, while its client has received nothing."""

_log = structlog.get_logger("kvern.router")


class Relay:
    """Sends a completed request to the cheapest replica and passes its frames on, unparsed."""

    def __init__(
        self, table: ReplicaTable, request: replica_pb2.ServeRequest, record: RequestRecord, rng: random.Random
    ) -> None:
        self._table = table
        self._request = request
        self._record = record
        self._rng = rng
        self._has_begun = False
        """Whether the client has received a frame: from then on another replica would repeat it."""

    async def frames(self, time_remaining: TimeRemaining) -> AsyncGenerator[bytes, None]:
        """Yield serialized GenerateResponses until the request has ended.

        Raises Unavailable where no replica can take it or the one that did is lost, AioRpcError with a replica's
        verdict.
        """
        tried: set[str] = set()
        while True:
            replica = self._choose(tried)
            tried.add(replica.address)
            self._record.replica = replica.address
            try:
                async with replica.serve(self._request, time_remaining()) as call:
                    async for response in call:
                        self._has_begun = True
                        yield response.client_frame
                return
            except grpc.aio.AioRpcError as error:
                self._give_up_or_go_on(replica, error, tried)

    def _choose(self, tried: Set[str]) -> Replica:
        candidates = self._table.candidates(self._record.model, tried)
        return self._table[by_cost(candidates, self._rng)[0].address]

    def _give_up_or_go_on(self, replica: Replica, error: grpc.aio.AioRpcError, tried: Set[str]) -> None:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise error
        self._table.suspect(replica)
        _log.warning("replica failed", replica=replica.address, details=error.details(), begun=self._has_begun)
        if self._has_begun or len(tried) > MAX_RETRIES or not self._table.ready(self._record.model, tried):
            raise Unavailable(f"replica {replica.address} failed: {error.details()}") from error
