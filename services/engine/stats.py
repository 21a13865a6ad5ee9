"""What the engine's metrics tell, counted once. `metrics.py` and `vllm_metrics.py` are two views of it."""

from __future__ import annotations

from kvern.engine.plan import Load, StepResult, StepStats
from kvern.engine.request import FinishReason
from kvern.services.runtime.histogram import Histogram
from kvern.services.runtime.metrics import LATENCY_BUCKETS_S, TOKEN_BUCKETS

_STEP_BUCKETS_S = (0.00001, 0.0001, 0.0005, *LATENCY_BUCKETS_S)
"""The host's share of a step is far below a millisecond."""

_COUNT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

_NS = 1e-9

PHASES = ("commands", "schedule", "prepare", "forward", "sample", "commit", "emit")


class EngineStats:
    """Counts since the start. The event loop writes; scrapes read from another thread."""

    def __init__(self) -> None:
        self.load = Load()
        """As of the last step."""
        self.prefix_cache_queries = 0
        """Prompt tokens that were looked up when their requests were first scheduled."""
        self.prefix_cache_hits = 0
        """Those found. Both count a request once: recompute after a preemption is neither."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.choices: dict[str, float] = {reason.value: 0 for reason in FinishReason}
        self.refused = 0
        self.step_seconds = Histogram(_STEP_BUCKETS_S)
        self.phase_seconds = {phase: Histogram(_STEP_BUCKETS_S) for phase in PHASES}
        self.step_tokens = Histogram(TOKEN_BUCKETS)
        self.step_sequences = Histogram(_COUNT_BUCKETS)
        self.inter_token_s = Histogram(LATENCY_BUCKETS_S)
        # Once a request, however many choices it has.
        self.time_to_first_token_s = Histogram(LATENCY_BUCKETS_S)
        self.queue_s = Histogram(LATENCY_BUCKETS_S)
        self.prefill_s = Histogram(LATENCY_BUCKETS_S)
        self.decode_s = Histogram(LATENCY_BUCKETS_S)
        self.inference_s = Histogram(LATENCY_BUCKETS_S)
        self.duration_s = Histogram(LATENCY_BUCKETS_S)
        self.time_per_output_token_s = Histogram(LATENCY_BUCKETS_S)
        self.request_prompt_tokens = Histogram(TOKEN_BUCKETS)
        self.request_generated_tokens = Histogram(TOKEN_BUCKETS)
        self.request_choices = Histogram(_COUNT_BUCKETS)
        self.request_max_tokens = Histogram(TOKEN_BUCKETS)

    def take(self, result: StepResult) -> None:
        """Count what is not about single requests."""
        self.load = result.load
        self.generated_tokens += len(result.token_ids)
        if result.step is not None:
            self._take_step(result.step)

    def _take_step(self, step: StepStats) -> None:
        times = step.times
        self.step_seconds.observe(step.seconds)
        self.step_tokens.observe(step.num_tokens)
        self.step_sequences.observe(step.num_seqs)
        phases = self.phase_seconds
        phases["commands"].observe(times.commands_ns * _NS)
        phases["schedule"].observe(times.schedule_ns * _NS)
        phases["prepare"].observe(times.prepare_ns * _NS)
        phases["forward"].observe(times.forward_ns * _NS)
        phases["sample"].observe(times.sample_ns * _NS)
        phases["commit"].observe(times.commit_ns * _NS)
        phases["emit"].observe(times.emit_ns * _NS)
