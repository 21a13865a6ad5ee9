from __future__ import annotations

import random

import prometheus_client
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from kvern.services.runtime.histogram import Families, Histogram
from kvern.services.runtime.metrics import LATENCY_BUCKETS_S, render

BUCKETS = (0.00001, *LATENCY_BUCKETS_S, 200_000.0)


class _Collected(Collector):
    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self) -> tuple[Metric, ...]:
        return self._families


def _text(*families: Metric) -> str:
    registry = CollectorRegistry()
    registry.register(_Collected(*families))
    return render(registry).decode()


def test_histogram_reads_as_the_librarys_that_was_told_each_value() -> None:
    """Values on a bound, below all and above all among them."""
    registry = CollectorRegistry()
    theirs = prometheus_client.Histogram("x_seconds", "Text.", ["model"], buckets=BUCKETS, registry=registry)
    ours = Histogram(BUCKETS)
    draw, count = random.Random(0), 0
    for value in (0.0, 0.001, 600.0, 1e9, *(draw.expovariate(1) for _ in range(50))):
        times = draw.randint(1, 5)
        ours.observe(value, times)
        count += times
        for _ in range(times):
            theirs.labels("m").observe(value)
    expected = {line for line in render(registry).decode().splitlines() if "_sum" not in line}
    text = _text(Families("x_", {"model": "m"}).histogram("seconds", "Text.", ours))
    assert {line for line in text.splitlines() if "_sum" not in line} == expected
    assert ours.count == count


def test_families_put_their_labels_on_every_series() -> None:
    make = Families("x_", {"model": "m"})
    text = _text(
        make.gauge("info", "Text.", 1, dtype="float32"),
        make.counter("tokens", "Text.", 3),
        make.counters("ends", "Text.", "reason", {"stop": 1, "abort": 2}),
        make.histograms("phase", "Text.", "of", {"a": Histogram((1,)), "b": Histogram((1,))}),
    )
    assert 'x_info{dtype="float32",model="m"} 1.0' in text
    assert 'x_tokens_total{model="m"} 3.0' in text
    assert 'x_ends_total{model="m",reason="abort"} 2.0' in text
    assert 'x_phase_bucket{le="+Inf",model="m",of="b"} 0.0' in text
