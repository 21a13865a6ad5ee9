"""RouterService: what operators call."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from kvern.services.router.audit import audited
from kvern.services.router.replica import Replica
from kvern.services.router.replica_table import ReplicaTable
from kvern.services.router.request_log import log_call
from kvern.services.runtime.errors import InvalidArgument, NotFound
from kvern.services.runtime.validate import check_name
from kvern.v1 import router_pb2, router_pb2_grpc

ROUTER_SERVICE = "kvern.v1.RouterService"

_Context = grpc.aio.ServicerContext[Any, Any]


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Tells operators what this router sees, and passes on what they want of replicas."""

    def __init__(self, table: ReplicaTable) -> None:
        self._table = table

    async def ListReplicas(
        self, request: router_pb2.ListReplicasRequest, context: _Context
    ) -> router_pb2.ListReplicasResponse:
        with log_call("ListReplicas", "", context.time_remaining):
            return router_pb2.ListReplicasResponse(replicas=[replica.status for replica in self._table])

    async def DrainReplica(
        self, request: router_pb2.DrainReplicaRequest, context: _Context
    ) -> router_pb2.DrainReplicaResponse:
        with audited("UndrainReplica" if request.undo else "DrainReplica", request.replica):
            check_name("replica", request.replica)
            replica = self._table.find(request.replica)
            await replica.set_draining(not request.undo)
            return router_pb2.DrainReplicaResponse(replica=replica.status)

    async def ResetCache(
        self, request: router_pb2.ResetCacheRequest, context: _Context
    ) -> router_pb2.ResetCacheResponse:
        with audited("ResetCache", request.replica or request.model):
            resets = await asyncio.gather(*map(_reset, self._targets(request)))
            return router_pb2.ResetCacheResponse(replicas=resets)

    def _targets(self, request: router_pb2.ResetCacheRequest) -> list[Replica]:
        match request.WhichOneof("target"):
            case "replica":
                check_name("replica", request.replica)
                return [self._table.find(request.replica)]
            case "model":
                check_name("model", request.model)
                replicas = [replica for replica in self._table if replica.model == request.model]
                if not replicas:
                    raise NotFound("no replica of this model is known here", reason="MODEL_NOT_FOUND")
                return replicas
        raise InvalidArgument("target", "missing; give replica or model")


async def _reset(replica: Replica) -> router_pb2.CacheReset:
    reset = router_pb2.CacheReset(id=replica.id, address=replica.address)
    try:
        await replica.drop_cache()
    except grpc.aio.AioRpcError as error:
        reset.error = error.details() or error.code().name
    return reset
