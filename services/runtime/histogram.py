"""Metrics as plain numbers, turned into Prometheus' families when they are read.

The library's own histogram takes one value at a time, under a lock. Where a step brings hundreds of equal values, or
where one count is told under two names, these are kept and the families are made of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily


class Histogram:
    """Counts values by bucket. One thread observes; any thread may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: greatest value of each bucket, ascending. One more takes what is greater than all."""
        self._bounds = tuple(bounds)
        self._names = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self._counts = [0] * len(self._names)
        self.sum = 0.0
        """Of all values."""

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, once or as often as it came."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return each bucket's greatest value as text, and how many values are no greater."""
        buckets, total = [], 0
        # Copied at once: while this goes on, another thread may observe.
        for name, count in zip(self._names, list(self._counts), strict=True):
            total += count
            buckets.append((name, float(total)))
        return buckets


class Families:
    """Makes families whose names begin alike and whose series all have the same labels."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._names, self._values = list(labels), list(labels.values())

    def gauge(self, name: str, text: str, value: float, **labels: str) -> GaugeMetricFamily:
        family = GaugeMetricFamily(self._prefix + name, text, labels=[*self._names, *labels])
        family.add_metric([*self._values, *labels.values()], value)
        return family

    def counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        """name: without `_total`."""
        family = CounterMetricFamily(self._prefix + name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
        """values: by the label's value. name: without `_total`."""
        family = CounterMetricFamily(self._prefix + name, text, labels=[*self._names, label])
        for each, value in list(values.items()):
            family.add_metric([*self._values, each], value)
        return family

    def histogram(self, name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self._prefix + name, text, labels=self._names)
        family.add_metric(self._values, histogram.buckets(), histogram.sum)
        return family

    def histograms(
        self, name: str, text: str, label: str, histograms: Mapping[str, Histogram]
    ) -> HistogramMetricFamily:
        """histograms: by the label's value."""
        family = HistogramMetricFamily(self._prefix + name, text, labels=[*self._names, label])
        for each, histogram in histograms.items():
            family.add_metric([*self._values, each], histogram.buckets(), histogram.sum)
        return family
