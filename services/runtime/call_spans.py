"""A span for each call that a gRPC server serves, as far as it belongs to a trace."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from kvern.services.runtime.interceptors import Behavior, code_at_end, wrap
from kvern.services.runtime.tracing import CARRIED, Carrier, Tracer, serve_in

_CLIENTS_DOOR = "/kvern.v1.InferenceService/"
"""Calls of clients begin a trace where they bring none. Others, such as probes and polls, only go on with one."""


class SpanInterceptor(grpc.aio.ServerInterceptor):
    """Traces calls. It stands outside of ErrorInterceptor, whose handlers are all coroutines and have set a status."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method, carrier = str(handler_call_details.method), carrier_of(handler_call_details.invocation_metadata)
        if handler is None or not (carrier or method.startswith(_CLIENTS_DOOR)):
            return handler
        return wrap(handler, lambda behavior: self._traced(behavior, method.removeprefix("/"), carrier))

    def _traced(self, behavior: Behavior, method: str, carrier: Carrier) -> Behavior:
        async def traced(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            span = self._tracer.serve(method, carrier)
            serve_in(span)
            started_at, has_returned = time.monotonic(), False
            try:
                response = await behavior(request, context)
                has_returned = True
                return response
            finally:
                elapsed_s = time.monotonic() - started_at
                span.end(code_at_end(context, has_returned=has_returned, elapsed_s=elapsed_s))

        return traced


def carrier_of(metadata: Any) -> Carrier:
    """Return what a call's metadata say of its trace."""
    return {key: value for key, value in metadata or () if key in CARRIED and isinstance(value, str)}
