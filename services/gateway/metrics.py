"""What a gateway counts of HTTP requests."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvern.services.runtime.metrics import LATENCY_BUCKETS_S

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
