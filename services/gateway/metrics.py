"""What a gateway counts of HTTP requests."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import Headers
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvern.services.gateway.event_stream import EventStream
from kvern.services.runtime.metrics import LATENCY_BUCKETS_S, OTHER

CLIENT_GONE = 499
"""Code of a request whose client did not wait for the end of its answer, as nginx has it."""

FAULT = 500


class GatewayMetrics:
    """HTTP requests by route: its template, of which there are a few, not the path that a client made up."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "kvern_gateway_requests",
            "HTTP requests that ended, by route and status code; 499 where the client went away before. A stream"
            " that fails once it has begun is a 200.",
            ["route", "code"],
            registry=registry,
        )
        self._duration = Histogram(
            "kvern_gateway_request_duration_seconds",
            "How long HTTP requests took, streams to their end.",
            ["route"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.open_streams = Gauge(
            "kvern_gateway_open_streams", "Answers being sent as server-sent events.", registry=registry
        )

    def count(self, route: str, code: int, duration_s: float) -> None:
        self._requests.labels(route, str(code)).inc()
        self._duration.labels(route).observe(duration_s)


class RequestCounter:
    """Middleware that counts requests, outside of all that may fail."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, routes: Sequence[Route]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(send, self._metrics.open_streams)
        started_at = time.monotonic()
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            answer.code = FAULT  # who catches it answers so
            raise
        finally:
            answer.close()
            self._metrics.count(self._route_of(scope), answer.code, time.monotonic() - started_at)

    def _route_of(self, scope: Scope) -> str:
        matching = (route.path for route in self._routes if route.matches(scope)[0] is not Match.NONE)
        return next(matching, OTHER)


class _Answer:
    """One answer on its way to the client."""

    def __init__(self, send: Send, open_streams: Gauge) -> None:
        self.code = CLIENT_GONE
        self._send = send
        self._open_streams = open_streams
        self._status = CLIENT_GONE
        self._is_stream = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._is_stream = Headers(raw=message["headers"]).get("content-type", "").startswith(EventStream.media_type)
            self._open_streams.inc(self._is_stream)
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.code = self._status

    def close(self) -> None:
        self._open_streams.dec(self._is_stream)
