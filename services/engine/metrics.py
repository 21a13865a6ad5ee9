"""The engine's metrics under Kvern's names, kvern_engine_*."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from kvern.engine.core import Output
from kvern.engine.plan import StepResult
from kvern.services.engine.engine_thread import EngineThread
from kvern.services.engine.index_writer import IndexWriter, ResyncReason
from kvern.services.engine.request_stats import RequestStats
from kvern.services.engine.stall_watch import StallWatch
from kvern.services.engine.stats import EngineStats
from kvern.services.runtime.histogram import Families
from kvern.v1 import replica_pb2


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine that was loaded, and when."""

    thread: EngineThread
    watch: StallWatch
    info: replica_pb2.EngineInfo
    load_s: float
    """How long loading took."""
    loaded_at: float
    """Of time.time()."""


class EngineMetrics(Collector):
    """Counts what the engine does, and tells it when scraped. All methods but `collect` belong to the event loop."""

    def __init__(self, registry: CollectorRegistry, model: str, writer: IndexWriter | None) -> None:
        """writer: what feeds the index of all replicas, if anything does."""
        self.model = model
        self.stats = EngineStats()
        self.requests = RequestStats(self.stats)
        self.loaded: Loaded | None = None
        self._writer = writer
        self._started_at = time.monotonic()
        self._families = Families("kvern_engine_", {"model": model})
        registry.register(self)

    def start_serving(self, thread: EngineThread, watch: StallWatch, info: replica_pb2.EngineInfo) -> None:
        """Tell that the engine is loaded."""
        self.loaded = Loaded(thread, watch, info, time.monotonic() - self._started_at, time.time())

    def on_output(self, output: Output) -> None:
        """Take in what the engine thread brought. Refusals come through `requests`."""
        if isinstance(output, StepResult):
            self.stats.take(output)
            self.requests.take(output)

    def collect(self) -> Iterator[Metric]:
        yield from self._counts()
        yield from self._steps()
        yield from self._request_times()
        yield from self._request_sizes()
        yield from self._index()
        if self.loaded is not None:
            yield from self._engine(self.loaded)

    def _counts(self) -> Iterator[Metric]:
        make, stats, load = self._families, self.stats, self.stats.load
        yield make.gauge("requests_running", "Choices that take part in steps.", load.num_running)
        yield make.gauge("requests_waiting", "Choices that wait to be scheduled.", load.num_waiting)
        yield make.gauge("requests_parked", "Choices that stand still, for their readers are slow.", load.num_parked)
        yield make.gauge("kv_blocks_used", "KV blocks that a choice refers to.", load.num_used_blocks)
        yield make.counter(
            "prefix_cache_queries", "Prompt tokens looked up at first admissions.", stats.prefix_cache_queries
        )
        yield make.counter("prefix_cache_hits", "Those of them that were cached.", stats.prefix_cache_hits)
        yield make.counter("preemptions", "How often a choice's blocks were taken from it.", load.num_preemptions)
        yield make.counter("prompt_tokens", "Prompt tokens of requests that were scheduled.", stats.prompt_tokens)
        yield make.counter("cached_tokens", "Those of them that were not computed.", stats.cached_tokens)
        yield make.counter("generated_tokens", "Tokens drawn.", stats.generated_tokens)
        yield make.counters("choices", "Choices that ended, by why.", "reason", stats.choices)
        yield make.counter("refused", "Requests that were not taken.", stats.refused)
        yield make.counter(
            "corrupted_requests", "Choices that ended since their logits were no numbers.", load.num_failed_choices
        )

    def _steps(self) -> Iterator[Metric]:
        make, stats = self._families, self.stats
        yield make.histogram("step_seconds", "From the end of a step to that of the next.", stats.step_seconds)
        yield make.histograms(
            "step_phase_seconds", "What a step's time goes to on the host.", "phase", stats.phase_seconds
        )
        yield make.histogram("step_tokens", "Tokens computed in a step.", stats.step_tokens)
        yield make.histogram("step_sequences", "Choices that take part in a step.", stats.step_sequences)

    def _request_times(self) -> Iterator[Metric]:
        make, stats = self._families, self.stats
        yield make.histogram(
            "time_to_first_token_seconds",
            "From a request's arrival at the replica to its first token.",
            stats.time_to_first_token_s,
        )
        yield make.histogram(
            "request_duration_seconds", "From a request's arrival at the replica to its end.", stats.duration_s
        )
        yield make.histogram("inter_token_latency_seconds", "Between two tokens of a choice.", stats.inter_token_s)
        yield make.histogram("queue_seconds", "From a request's arrival to its first step.", stats.queue_s)
        yield make.histogram("prefill_seconds", "From a request's first step to its first token.", stats.prefill_s)
        yield make.histogram("decode_seconds", "From a request's first token to its last.", stats.decode_s)
        yield make.histogram("inference_seconds", "From a request's first step to its last token.", stats.inference_s)
        yield make.histogram(
            "time_per_output_token_seconds",
            "Of a request's decoding, a token of its longest choice.",
            stats.time_per_output_token_s,
        )

    def _request_sizes(self) -> Iterator[Metric]:
        make, stats = self._families, self.stats
        yield make.histogram("request_prompt_tokens", "Of a request's prompt.", stats.request_prompt_tokens)
        yield make.histogram(
            "request_generated_tokens", "Of all of a request's choices.", stats.request_generated_tokens
        )
        yield make.histogram("request_choices", "Choices a request asks for.", stats.request_choices)
        yield make.histogram("request_max_tokens", "Tokens a request allows each choice.", stats.request_max_tokens)

    def _index(self) -> Iterator[Metric]:
        make, writer = self._families, self._writer
        audits = {"ok": writer.num_matches, "mismatch": writer.num_mismatches} if writer else {"ok": 0, "mismatch": 0}
        resyncs = writer.resyncs if writer is not None else dict.fromkeys(ResyncReason, 0)
        yield make.counters("index_audits", "Comparisons of the index with what it was sent.", "result", audits)
        yield make.counters(
            "index_resyncs",
            "Snapshots sent to the index, by why.",
            "reason",
            {reason.value: count for reason, count in resyncs.items()},
        )
        yield make.gauge(
            "index_pending_digests",
            "Changes that the index has not been told.",
            writer.num_pending if writer is not None else 0,
        )
        if writer is not None:
            yield make.gauge("redis_up", "Whether Redis answers.", float(writer.is_up is True))

    def _engine(self, loaded: Loaded) -> Iterator[Metric]:
        make, info, load = self._families, loaded.info, self.stats.load
        yield make.gauge(
            "info",
            "What the engine is.",
            1,
            dtype=info.dtype,
            device=info.device,
            block_size=str(info.block_size),
            num_blocks=str(info.num_blocks),
            max_model_len=str(info.max_model_len),
            contract=info.contract,
        )
        yield make.gauge("kv_blocks", "KV blocks in the pool.", info.num_blocks)
        yield make.gauge(
            "kv_usage_ratio", "Share of the pool that a choice refers to.", load.num_used_blocks / info.num_blocks
        )
        yield make.gauge("step_age_seconds", "Since the last step ended; 0 without work.", loaded.thread.step_age_s)
        yield make.gauge("stalled", "Whether a step is stuck.", float(loaded.watch.is_stuck))
        yield make.gauge("start_time_seconds", "When the engine was loaded, since 1970.", loaded.loaded_at)
        yield make.gauge("load_seconds", "How long loading took.", loaded.load_s)
