"""ReplicaService: the front door as routers know it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from kvern.services.detokenizer.frames import ServeFrames
from kvern.services.detokenizer.front_door import FrontDoor
from kvern.v1 import replica_pb2, replica_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]

_log = structlog.get_logger("kvern.detokenizer")


class ReplicaServicer(replica_pb2_grpc.ReplicaServiceServicer):
    """Lets routers in."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door

    def Serve(self, request: replica_pb2.ServeRequest, context: _Context) -> AsyncIterator[replica_pb2.ServeResponse]:
        frames = ServeFrames(tells_ids=request.request.output.token_ids)
        return self._door.run(request, frames, context.time_remaining())

    async def GetReplicaInfo(
        self, request: replica_pb2.GetReplicaInfoRequest, context: _Context
    ) -> replica_pb2.GetReplicaInfoResponse:
        door = self._door
        return replica_pb2.GetReplicaInfoResponse(state=door.state, engine=door.engine.info, load=door.load())

    async def SetDraining(
        self, request: replica_pb2.SetDrainingRequest, context: _Context
    ) -> replica_pb2.SetDrainingResponse:
        self._door.is_set_aside = request.draining
        _log.info("drained by an operator" if request.draining else "taken back by an operator")
        return replica_pb2.SetDrainingResponse()

    async def DropCache(
        self, request: replica_pb2.DropCacheRequest, context: _Context
    ) -> replica_pb2.DropCacheResponse:
        self._door.engine.drop_cache()
        _log.info("cache dropped by an operator")
        return replica_pb2.DropCacheResponse()
