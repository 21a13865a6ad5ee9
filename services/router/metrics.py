"""What a router counts of its requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvern.services.router.limits.verdict import Limit
from kvern.services.runtime.deadline import DEADLINE_UNREACHABLE
from kvern.services.runtime.errors import ResourceExhausted
from kvern.services.runtime.histogram import Histogram as PlainHistogram
from kvern.services.runtime.metrics import LATENCY_BUCKETS_S, OTHER, TOKEN_BUCKETS, ModelLabel
from kvern.services.runtime.slow_reader import SLOW_READER
from kvern.v1 import replica_pb2

SHED_REASONS = (ResourceExhausted.reason, DEADLINE_UNREACHABLE, SLOW_READER, *(limit.value for limit in Limit))

LOOKUP_BUCKETS_S = (0.0001, 0.0002, 0.0005, *LATENCY_BUCKETS_S[:10])
"""A lookup takes half a millisecond, and has a few."""


class MoveReason(StrEnum):
    """Why a replica was left in mid-stream."""

    UNAVAILABLE = "unavailable"
    DRAINED = "drained"
    STALLED = "stalled"
    OTHER = "other"


class IndexMetrics:
    """Lookups in the prefix index."""

    def __init__(self, registry: CollectorRegistry) -> None:
        lookups = Counter(
            "kvern_router_index_lookups",
            "Lookups in the prefix index by result. One that gets no answer within its budget is a timeout, and its"
            " request is placed by load.",
            ["result"],
            registry=registry,
        )
        self.ok, self.timeouts, self.errors = (lookups.labels(result) for result in ("ok", "timeout", "error"))
        self.duration = Histogram(
            "kvern_router_index_lookup_seconds",
            "How long lookups in the prefix index took, those without an answer included.",
            buckets=LOOKUP_BUCKETS_S,
            registry=registry,
        )


class RouterMetrics:
    """Counts what happens to requests. Its models are those that `know` was told, and `other`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._families = _Families(registry)
        self._models: dict[str, _OfModel] = {}
        self._label = ModelLabel(self._models.keys)
        registry.register(_Tokens(lambda: [*list(self._models.values()), self._families.other]))
        self.index = IndexMetrics(registry)
        self.tokenize = Histogram(
            "kvern_router_tokenize_seconds",
            "How long the tokenizer took to answer, as the router sees it.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.placement = Histogram(
            "kvern_router_placement_seconds",
            "From a request's arrival until it was placed, without what the tokenizer took.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.retries = Counter(
            "kvern_router_retries",
            "Requests sent to another replica before their stream had begun.",
            registry=registry,
        )
        self.retries_refused = Counter(
            "kvern_router_retries_refused",
            "Retries and hedges that the budget for them did not allow.",
            registry=registry,
        )
        self.poisoned = Counter(
            "kvern_router_poisoned",
            "Requests given up because two replicas in a row failed at them without a new token.",
            registry=registry,
        )
        hedges = Counter(
            "kvern_router_hedges",
            "Second replicas asked because the first was slow, by whether they were the ones to go on.",
            ["result"],
            registry=registry,
        )
        self._hedges = {has_won: hedges.labels("won" if has_won else "lost") for has_won in (True, False)}

    @property
    def models(self) -> list[str]:
        """Those known so far. Any thread may ask."""
        return list(self._models)

    def know(self, models: Iterable[str]) -> None:
        """Keep series of these models from now on, so that one without requests reads 0."""
        for model in models:
            self.of(model)

    def of(self, label: str) -> _OfModel:
        """Return a model's series. The label must be bounded."""
        if label not in self._models and label != OTHER:
            self._models[label] = _OfModel(self._families, label)
        return self._models[label] if label != OTHER else self._families.other

    def begin(self, model: str) -> RequestMetrics:
        """Count a request that came just now, by the name it gives. It must be ended."""
        return RequestMetrics(self, model)

    def label(self, model: str) -> str:
        return self._label(model)

    def count_hedge(self, has_won: bool) -> None:
        self._hedges[has_won].inc()


class RequestMetrics:
    """One request, from its arrival to its one end. It waits until it has a replica."""

    def __init__(self, router: RouterMetrics, model: str) -> None:
        self.router = router
        self._arrived_at = time.monotonic()
        self._token_at: dict[int, float] = {}
        """When each choice last got tokens, of time.monotonic()."""
        self.first_token_s: float | None = None
        """From its arrival to its first token; None before that."""
        self._is_scheduled = False
        self._has_replica = False
        self._of = router.of(router.label(model))
        self._of.demand.inc()
        self._of.waiting.inc()

    def resolve(self, model: str) -> None:
        """The request's model is known."""
        of = self.router.of(self.router.label(model))
        if of is not self._of:
            for gauge, now in ((self._of, -1), (of, 1)):
                gauge.demand.inc(now)
                gauge.waiting.inc(now)
            self._of = of

    def set_replica(self, has_replica: bool) -> None:
        """Whether a replica has it, or it waits for one."""
        if has_replica != self._has_replica:
            self._has_replica = has_replica
            self._of.running.inc(1 if has_replica else -1)
            self._of.waiting.inc(-1 if has_replica else 1)

    def schedule(self, prompt_tokens: int, cached_tokens: int, predicted_tokens: int | None) -> None:
        """A replica has begun with its prompt. Later calls change nothing.

        predicted_tokens: as many as were expected to be cached; None where nobody asked.
        """
        if self._is_scheduled:
            return
        self._is_scheduled = True
        self._of.prompt_tokens.inc(prompt_tokens)
        self._of.cached_tokens.inc(cached_tokens)
        if predicted_tokens is not None:
            self._of.predict(predicted_tokens, cached_tokens)

    def take(self, updates: Iterable[replica_pb2.ChoiceUpdate]) -> None:
        """A message with these came from a replica."""
        now = time.monotonic()
        of, token_at = self._of, self._token_at
        for update in updates:
            if num_tokens := len(update.new_token_ids):
                index = update.index
                of.num_generated_tokens += num_tokens
                last_at = token_at.get(index)
                if last_at is not None:
                    of.inter_token.observe(now - last_at)
                elif not token_at:
                    self.first_token_s = now - self._arrived_at
                    of.first_token.observe(self.first_token_s)
                token_at[index] = now

    def move(self, reason: MoveReason) -> None:
        """Another replica is to go on with its stream."""
        self._of.migrations[reason].inc()

    def end(self, code: grpc.StatusCode, reason: str) -> None:
        """The request has ended. reason: of ErrorInfo, empty where there is none."""
        self.set_replica(False)
        self._of.demand.dec()
        self._of.waiting.dec()
        self._of.duration.observe(time.monotonic() - self._arrived_at)
        self._of.count_end(code)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self._of.count_shed(reason)


class _Families:
    """All metrics that a model's name is a label of."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.requests = self._counter(
            "requests", "Generate calls that ended, by status code. A client that goes away is CANCELLED.", "code"
        )
        self.first_token = self._seconds("time_to_first_token_seconds", "From a request's arrival to its first token.")
        self.duration = self._seconds(
            "request_duration_seconds", "From a request's arrival to its end, whatever came of it."
        )
        self.demand = self._gauge(
            "demand", "Requests running and waiting, those without a replica included: what to scale replicas by."
        )
        self.running = self._gauge("requests_running", "Requests that a replica has.")
        self.waiting = self._gauge(
            "requests_waiting",
            "Requests without a replica: before they are placed, and while another one is sought for a broken stream.",
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that a replica began with.")
        self.cached_tokens = self._counter("cached_tokens", "Those prompt tokens that were cached there.")
        self.predicted_tokens = self._counter(
            "predicted_cached_tokens", "Prompt tokens that were expected to be cached, where the index was asked."
        )
        self.predictions = self._counter(
            "predictions",
            "Requests that the index was asked for, by how many cached tokens were expected: as many as there were"
            " (exact), more (over) or fewer (under).",
            "result",
        )
        self.prediction_error = Histogram(
            "kvern_router_prediction_error_tokens",
            "By how many cached tokens the expectation was off.",
            ["model"],
            buckets=(0, *TOKEN_BUCKETS),
            registry=registry,
        )
        self.migrations = self._counter(
            "migrations", "Streams that another replica went on with, by what became of the one before.", "reason"
        )
        self.sheds = self._counter(
            "sheds",
            "Requests that ended with RESOURCE_EXHAUSTED, by ErrorInfo.reason: no room, a deadline that cannot be met,"
            " a client that does not read, or a tenant's limits.",
            "reason",
        )
        self.other = _OfModel(self, OTHER)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvern_router_{name}", text, ["model", *labels], registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"kvern_router_{name}", text, ["model"], registry=self._registry)

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(f"kvern_router_{name}", text, ["model"], buckets=LATENCY_BUCKETS_S, registry=self._registry)


class _Tokens(Collector):
    """What every message with tokens adds to. The library's own metrics would cost as much as all else that is done for
    them.
    """

    def __init__(self, models: Callable[[], Iterable[_OfModel]]) -> None:
        self._models = models

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        tokens = CounterMetricFamily(
            "kvern_router_generated_tokens", "Output tokens that replicas sent.", labels=["model"]
        )
        latency = HistogramMetricFamily(
            "kvern_router_inter_token_latency_seconds",
            "Between two messages with tokens of one choice, also where another replica went on in between.",
            labels=["model"],
        )
        for of in self._models():
            tokens.add_metric([of.model], of.num_generated_tokens)
            latency.add_metric([of.model], of.inter_token.buckets(), of.inter_token.sum)
        yield tokens
        yield latency


class _OfModel:
    """One model's series. They are found once: looking one up takes as long as all else that a message costs."""

    def __init__(self, families: _Families, model: str) -> None:
        self.first_token = families.first_token.labels(model)
        self.inter_token = PlainHistogram(LATENCY_BUCKETS_S)
        self.duration = families.duration.labels(model)
        self.demand = families.demand.labels(model)
        self.running = families.running.labels(model)
        self.waiting = families.waiting.labels(model)
        self.prompt_tokens = families.prompt_tokens.labels(model)
        self.cached_tokens = families.cached_tokens.labels(model)
        self.num_generated_tokens = 0
        self.migrations = {reason: families.migrations.labels(model, reason.value) for reason in MoveReason}
        self._predicted_tokens = families.predicted_tokens.labels(model)
        self._prediction_error = families.prediction_error.labels(model)
        self._predictions = {
            result: families.predictions.labels(model, result) for result in ("exact", "over", "under")
        }
        self._sheds = {reason: families.sheds.labels(model, reason) for reason in (*SHED_REASONS, OTHER)}
        self.model = model
        self._requests = families.requests
        self._requests.labels(model, grpc.StatusCode.OK.name)

    def count_end(self, code: grpc.StatusCode) -> None:
        self._requests.labels(self.model, code.name).inc()

    def count_shed(self, reason: str) -> None:
        self._sheds.get(reason, self._sheds[OTHER]).inc()

    def predict(self, predicted_tokens: int, cached_tokens: int) -> None:
        error = predicted_tokens - cached_tokens
        self._predicted_tokens.inc(predicted_tokens)
        self._prediction_error.observe(abs(error))
        self._predictions["exact" if not error else "over" if error > 0 else "under"].inc()
