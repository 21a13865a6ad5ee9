"""What all services' metrics have in common: one registry a process, buckets, labels that stay few, and the text."""

from __future__ import annotations

from collections.abc import Callable, Collection

import prometheus_client
from prometheus_client import CollectorRegistry, Info

from kvern.version import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Whatever a scraper would accept: OpenMetrics allows no colon in a name, and renames `vllm:x` to `vllm_x`."""

LATENCY_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0
)  # fmt: skip
"""From what a cached token takes to what a long answer takes, in seconds."""

TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)

OTHER = "other"
"""Label of what clients may name at will."""

# A series of its own for when each counter was made tells nothing and doubles their number.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


def new_registry(service: str) -> CollectorRegistry:
    """Make a process's registry. It tells of the process itself and of its version."""
    registry = CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    prometheus_client.GCCollector(registry=registry)
    build = Info("kvern_build", "What runs here.", registry=registry)
    build.info({"service": service, "version": __version__})
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """Return all metrics in Prometheus' text format 0.0.4. Any thread may call this."""
    return prometheus_client.generate_latest(registry)


class ModelLabel:
    """Turns a model name from a request into a label: a client can name anything, a label must stay one of few."""

    def __init__(self, served: Callable[[], Collection[str]]) -> None:
        self._served = served

    def __call__(self, model: str) -> str:
        served = self._served()
        if model in served:
            return model
        # No name means the one model there is.
        return next(iter(served)) if not model and len(served) == 1 else OTHER
