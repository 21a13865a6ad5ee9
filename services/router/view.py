"""What a router's metrics tell of how things stand, read when a scraper asks, in whatever thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvern.services.router.admission import Admission
from kvern.services.router.index_reader import IndexReader
from kvern.services.router.replica import Replica
from kvern.services.router.replica_table import ReplicaTable
from kvern.services.router.tokenizer import Tokenizer
from kvern.services.runtime.metrics import OTHER

STATES = ("ready", "starting", "draining", "stalled", "unreachable")


def show_peers(registry: CollectorRegistry, tokenizer: Tokenizer, index: IndexReader | None) -> None:
    """Add what is known of the services beside the router."""
    _gauge(registry, "tokenizer_up", "Whether the tokenizer serves.", lambda: tokenizer.is_serving)
    if index is not None:
        _gauge(registry, "redis_up", "Whether Redis answered when the registry was last read.", lambda: index.is_up)
        _gauge(
            registry,
            "registry_age_seconds",
            "Since the registry of replicas was last read; since the router's start where it never was.",
            lambda: index.registry_age_s,
        )


def show_streams(registry: CollectorRegistry, admission: Admission) -> None:
    """Add how full the router is."""
    _gauge(registry, "streams", "Generate calls in flight.", lambda: admission.num_streams)
    _gauge(registry, "max_streams", "Generate calls that may be in flight.", lambda: admission.max_streams)


class ReplicaStates(Collector):
    """Counts replicas by model and state."""

    def __init__(self, table: ReplicaTable, models: Callable[[], Iterable[str]]) -> None:
        """models: those that are told of even when they have no replica."""
        self._table = table
        self._models = models

    def collect(self) -> Iterator[GaugeMetricFamily]:
        known = set(self._models())
        counts = Counter((_model_of(replica, known), state_of(replica)) for replica in self._table)
        family = GaugeMetricFamily(
            "kvern_router_replicas",
            "Replicas that this router knows, by model and state. Only ready ones get new requests.",
            labels=["model", "state"],
        )
        for model in sorted({*known, *(model for model, _ in counts)}):
            for state in STATES:
                family.add_metric([model, state], counts[model, state])
        yield family


def state_of(replica: Replica) -> str:
    """Return one of STATES."""
    if replica.is_ready:
        return "ready"
    if replica.is_starting:
        return "starting"
    if not replica.reachable:
        return "unreachable"
    if replica.is_draining:
        return "draining"
    return "stalled" if replica.is_stalled else "starting"


def _model_of(replica: Replica, known: set[str]) -> str:
    return replica.model if replica.model in known else OTHER


def _gauge(registry: CollectorRegistry, name: str, text: str, read: Callable[[], float]) -> None:
    Gauge(f"kvern_router_{name}", text, registry=registry).set_function(read)
