"""How many calls a gRPC server serves, how they end, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram

from kvern.services.runtime.interceptors import Behavior, code_at_end, wrap
from kvern.services.runtime.metrics import LATENCY_BUCKETS_S, OTHER


class MetricsInterceptor(grpc.aio.ServerInterceptor):
    """Counts calls. It stands outside of ErrorInterceptor, whose handlers are all coroutines and have set a status."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "kvern_rpc_requests",
            "gRPC calls that ended, by method and status code. Methods that do not exist count as `other`.",
            ["method", "code"],
            registry=registry,
        )
        self._duration = Histogram(
            "kvern_rpc_duration_seconds",
            "How long gRPC calls took, streams to their end.",
            ["method"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            self._requests.labels(OTHER, grpc.StatusCode.UNIMPLEMENTED.name).inc()
            return None
        method = str(handler_call_details.method).removeprefix("/")
        return wrap(handler, lambda behavior: self._measured(behavior, method))

    def _measured(self, behavior: Behavior, method: str) -> Behavior:
        async def measured(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            started_at = time.monotonic()
            has_returned = False
            try:
                response = await behavior(request, context)
                has_returned = True
                return response
            finally:
                duration_s = time.monotonic() - started_at
                code = code_at_end(context, has_returned=has_returned, elapsed_s=duration_s)
                self._requests.labels(method, code.name).inc()
                self._duration.labels(method).observe(duration_s)

        return measured
