"""What a detokenizer counts of its replica's requests, and what it tells of itself when a scraper asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvern.services.runtime.deadline import DEADLINE_UNREACHABLE
from kvern.services.runtime.errors import ResourceExhausted
from kvern.services.runtime.metrics import LATENCY_BUCKETS_S, OTHER
from kvern.services.runtime.slow_reader import SLOW_READER, ReaderWatch
from kvern.v1 import inference_pb2

STOP, LENGTH, ABORT, ERROR = "stop", "length", "abort", "error"

_REASONS: dict[inference_pb2.FinishReason.ValueType, str] = {
    inference_pb2.FINISH_REASON_STOP: STOP,
    inference_pb2.FINISH_REASON_LENGTH: LENGTH,
    inference_pb2.FINISH_REASON_ABORT: ABORT,
}

_SHED_REASONS = (ResourceExhausted.reason, DEADLINE_UNREACHABLE, SLOW_READER)


class DetokenizerMetrics:
    """All that is counted. A model's name is the engine's word, so there are as many as its replica has served."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.choices = Counter(
            "kvern_detokenizer_choices",
            "Choices that ended, by reason: stop, length, abort (the call was cancelled, by its client or to go on"
            " elsewhere) or error (the choice or the whole call failed).",
            ["model", "reason"],
            registry=registry,
        )
        self.first_token = _seconds(
            registry, "time_to_first_token_seconds", "From a request's arrival here to its first token."
        )
        self.duration = _seconds(
            registry,
            "request_duration_seconds",
            "From an accepted request's arrival here to its end, however it ends.",
        )
        self.tokens = Counter(
            "kvern_detokenizer_tokens", "Output tokens turned into text.", ["model"], registry=registry
        )
        self.text_bytes = Counter("kvern_detokenizer_text_bytes", "Bytes of text sent, in UTF-8.", registry=registry)
        self.parks = Counter(
            "kvern_detokenizer_parks",
            "How often a request was made to stand still because its reader did not keep up.",
            registry=registry,
        )
        sheds = Counter(
            "kvern_detokenizer_sheds",
            "Requests that ended with RESOURCE_EXHAUSTED, by ErrorInfo.reason: no room, a deadline that cannot be met,"
            " or a reader that does not read.",
            ["reason"],
            registry=registry,
        )
        self._sheds = {reason: sheds.labels(reason) for reason in (*_SHED_REASONS, OTHER)}
        self._models: dict[str, ModelMetrics] = {}

    def of(self, model: str) -> ModelMetrics:
        """Return the series of the model that the engine has."""
        if model not in self._models:
            self._models[model] = ModelMetrics(self, model)
        return self._models[model]

    @contextmanager
    def counting_sheds(self, reader: ReaderWatch) -> Iterator[None]:
        """Count a call that ends with ResourceExhausted, raised in the block or the verdict on its reader."""
        try:
            yield
        except ResourceExhausted as error:
            self._count_shed(error)
            raise
        finally:
            if reader.verdict is not None:
                self._count_shed(reader.verdict)

    def _count_shed(self, error: ResourceExhausted) -> None:
        self._sheds.get(error.reason, self._sheds[OTHER]).inc()


class ModelMetrics:
    """One model's series. They are found once, not for every message."""

    def __init__(self, all_models: DetokenizerMetrics, model: str) -> None:
        self.first_token = all_models.first_token.labels(model)
        self.duration = all_models.duration.labels(model)
        self.tokens = all_models.tokens.labels(model)
        self.text_bytes = all_models.text_bytes
        self._ends = {reason: all_models.choices.labels(model, reason) for reason in (STOP, LENGTH, ABORT, ERROR)}

    def count_finished(self, reason: inference_pb2.FinishReason.ValueType) -> None:
        """A choice's Finished was told."""
        self.count_ends(_REASONS.get(reason, ERROR), 1)

    def count_ends(self, reason: str, num_choices: int) -> None:
        """Choices have ended, for one of the reasons above."""
        self._ends[reason].inc(num_choices)

    @contextmanager
    def timing(self, arrived_at: float) -> Iterator[None]:
        """Take a request's duration however the block ends. arrived_at: of time.monotonic()."""
        try:
            yield
        finally:
            self.duration.observe(time.monotonic() - arrived_at)


class _Streams(Protocol):
    @property
    def num_streams(self) -> int: ...
    @property
    def max_streams(self) -> int: ...


class _Engine(Protocol):
    @property
    def info(self) -> object | None: ...
    @property
    def num_parked(self) -> int: ...
    @property
    def predicted_wait_s(self) -> float: ...


def show_state(registry: CollectorRegistry, engine: _Engine, streams: _Streams) -> None:
    """Add how things stand, read in whatever thread a scraper is answered in."""
    _gauge(registry, "streams", "Calls of routers in flight.", lambda: streams.num_streams)
    _gauge(registry, "max_streams", "Calls of routers that may be in flight.", lambda: streams.max_streams)
    _gauge(registry, "parked", "Requests that stand still for their readers.", lambda: engine.num_parked)
    _gauge(registry, "engine_connected", "Whether the engine has this stream open.", lambda: engine.info is not None)
    _gauge(
        registry,
        "predicted_wait_seconds",
        "How long a request that came now would wait for its turn, 0 where too little is known.",
        lambda: engine.predicted_wait_s,
    )


def _seconds(registry: CollectorRegistry, name: str, text: str) -> Histogram:
    return Histogram(f"kvern_detokenizer_{name}", text, ["model"], buckets=LATENCY_BUCKETS_S, registry=registry)


def _gauge(registry: CollectorRegistry, name: str, text: str, read: Callable[[], float]) -> None:
    Gauge(f"kvern_detokenizer_{name}", text, registry=registry).set_function(read)
