"""grpc.health.v1 with watches that do not hold up a drain."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

HEALTH_SERVICE = health.SERVICE_NAME

WHOLE_FLEET = "kvern.fleet"
"""What a router's health is asked for by who wants to know whether all its replicas are ready, and may ask nothing
else."""


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]  # the library is untyped
    """The library's, except that its watches, which last as long as their watchers like, can be ended."""

    def __init__(self) -> None:
        super().__init__()
        self._watches_end = asyncio.Event()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        watch = asyncio.ensure_future(super().Watch(request, context))
        end = asyncio.ensure_future(self._watches_end.wait())
        try:
            await asyncio.wait({watch, end}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            end.cancel()

    def end_watches(self) -> None:
        """End all watches, and those that come later at once."""
        self._watches_end.set()
