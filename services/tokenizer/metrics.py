"""What a tokenizer counts of its work, and what it tells of itself when a scraper asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvern.services.runtime.metrics import LATENCY_BUCKETS_S
from kvern.services.tokenizer.prefix_cache import PrefixCache
from kvern.services.tokenizer.workers import Workers
from kvern.v1 import tokenizer_pb2

_Encode = Callable[[tokenizer_pb2.EncodePromptRequest, str | None], tokenizer_pb2.EncodePromptResponse]


class TokenizerMetrics:
    """Counts encoding by model. Threads may share it."""

    def __init__(self, registry: CollectorRegistry, models: Iterable[str]) -> None:
        duration = Histogram(
            "kvern_tokenizer_encode_seconds",
            "How long a thread encoded one prompt, digests of its blocks included, waiting and rendering a chat not.",
            ["model"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        tokens = Counter("kvern_tokenizer_tokens", "Tokens that prompts were encoded to.", ["model"], registry=registry)
        models = list(models)
        self._duration = {model: duration.labels(model) for model in models}
        self._tokens = {model: tokens.labels(model) for model in models}

    def counting(self, model: str, encode: _Encode) -> _Encode:
        """Return a function that encodes prompts of a served model and counts them."""

        def counted(
            request: tokenizer_pb2.EncodePromptRequest, rendered: str | None
        ) -> tokenizer_pb2.EncodePromptResponse:
            with self._duration[model].time():
                response = encode(request, rendered)
            self._tokens[model].inc(len(response.token_ids))
            return response

        return counted


class TokenizerState(Collector):
    """How full the queue and the cache are, and what came of both so far."""

    def __init__(self, workers: Workers, cache: PrefixCache) -> None:
        self._workers = workers
        self._cache = cache

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        workers, cache = self._workers, self._cache
        yield GaugeMetricFamily("kvern_tokenizer_queue", "Texts waiting or in work.", workers.num_jobs)
        refused = CounterMetricFamily(
            "kvern_tokenizer_refused",
            "Requests refused because as many as may wait were waiting (jobs), or as many bytes (bytes).",
            labels=["reason"],
        )
        for reason, number in workers.num_refused.items():
            refused.add_metric([reason], number)
        yield refused
        yield CounterMetricFamily(
            "kvern_tokenizer_prefix_cache_lookup_bytes",
            "Bytes of the beginnings of texts that were looked for in the cache.",
            cache.lookup_bytes,
        )
        yield CounterMetricFamily(
            "kvern_tokenizer_prefix_cache_hit_bytes",
            "Bytes of the beginnings of texts that were found in the cache, and not encoded again.",
            cache.hit_bytes,
        )
        yield GaugeMetricFamily("kvern_tokenizer_prefix_cache_bytes", "Bytes that the cache takes.", cache.num_bytes)
