"""The engine's metrics under vLLM's names: what dashboards and Kubernetes' inference extension read already.

A view of the same counts. Where the names leave it open, the meaning is vLLM's, with one exception: what vLLM observes
for each choice of a request is observed once a request.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from kvern.services.engine.metrics import EngineMetrics
from kvern.services.engine.settings import EngineSettings
from kvern.services.runtime.histogram import Families

_ENGINE = "0"
"""vLLM numbers the engines behind one front end; here each has its own."""


class VllmMetrics(Collector):
    """Tells an `EngineMetrics`' counts when scraped."""

    def __init__(self, registry: CollectorRegistry, metrics: EngineMetrics, settings: EngineSettings) -> None:
        self._metrics = metrics
        self._families = Families("vllm:", {"model_name": metrics.model, "engine": _ENGINE})
        self._cache_config = cache_config(settings)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._latencies()
        yield from self._sizes()

    def _gauges(self) -> Iterator[Metric]:
        make, load, loaded = self._families, self._metrics.stats.load, self._metrics.loaded
        yield make.gauge("num_requests_running", "Requests that take part in steps.", load.num_running)
        yield make.gauge("num_requests_waiting", "Requests that wait to be scheduled.", load.num_waiting)
        yield make.gauge(
            "lora_requests_info",
            "Adapters in use: none.",
            time.time(),
            max_lora="0",
            waiting_lora_adapters="",
            running_lora_adapters="",
        )
        if loaded is None:
            return
        info = loaded.info
        yield make.gauge(
            "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", load.num_used_blocks / info.num_blocks
        )
        yield make.gauge(
            "cache_config_info",
            "How KV memory is laid out.",
            1,
            block_size=str(info.block_size),
            num_gpu_blocks=str(info.num_blocks),
            **self._cache_config,
        )

    def _counters(self) -> Iterator[Metric]:
        make, stats, load = self._families, self._metrics.stats, self._metrics.stats.load
        yield make.counter("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries)
        yield make.counter("prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits)
        yield make.counter("num_preemptions", "Preemptions.", load.num_preemptions)
        yield make.counter("prompt_tokens", "Prompt tokens.", stats.prompt_tokens)
        yield make.counter("prompt_tokens_cached", "Prompt tokens that were not computed.", stats.cached_tokens)
        yield make.counter("generation_tokens", "Tokens generated.", stats.generated_tokens)
        yield make.counters("request_success", "Choices that ended, by why.", "finished_reason", stats.choices)
        yield make.counter("corrupted_requests", "Requests with logits that are no numbers.", load.num_failed_choices)

    def _latencies(self) -> Iterator[Metric]:
        make, stats = self._families, self._metrics.stats
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token.", stats.time_to_first_token_s),
            ("inter_token_latency_seconds", "Between two tokens.", stats.inter_token_s),
            ("request_time_per_output_token_seconds", "Decoding, a token.", stats.time_per_output_token_s),
            ("e2e_request_latency_seconds", "Arrival to end.", stats.duration_s),
            ("request_queue_time_seconds", "Arrival to first step.", stats.queue_s),
            ("request_prefill_time_seconds", "First step to first token.", stats.prefill_s),
            ("request_decode_time_seconds", "First token to last.", stats.decode_s),
            ("request_inference_time_seconds", "First step to last token.", stats.inference_s),
        ):
            yield make.histogram(name, text, histogram)

    def _sizes(self) -> Iterator[Metric]:
        make, stats = self._families, self._metrics.stats
        for name, text, histogram in (
            ("request_prompt_tokens", "Of a request's prompt.", stats.request_prompt_tokens),
            ("request_generation_tokens", "Of a request's output.", stats.request_generated_tokens),
            ("request_params_n", "Choices asked for.", stats.request_choices),
            ("request_params_max_tokens", "Most tokens of a choice.", stats.request_max_tokens),
            ("iteration_tokens_total", "Tokens computed in a step.", stats.step_tokens),
        ):
            yield make.histogram(name, text, histogram)


def cache_config(settings: EngineSettings) -> Mapping[str, str]:
    """Return labels of cache_config_info that do not depend on the loaded engine, as vLLM writes them."""
    return {
        "cache_dtype": settings.dtype,
        "enable_prefix_caching": str(settings.enable_prefix_caching),
        "gpu_memory_utilization": str(settings.gpu_memory_utilization),
        "num_cpu_blocks": "None",
    }
