"""Two views of one count: what is told under vLLM's names is what is told under Kvern's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvern.engine.plan import ChoiceEnded, FirstScheduled, Load, StepResult, StepStats, StepTimes
from kvern.engine.request import FinishReason
from kvern.services.engine.engine_thread import EngineThread
from kvern.services.engine.metrics import EngineMetrics
from kvern.services.engine.settings import EngineSettings
from kvern.services.engine.stall_watch import StallWatch
from kvern.services.engine.vllm_metrics import VllmMetrics
from kvern.services.runtime.metrics import render
from kvern.v1 import engine_pb2, inference_pb2, replica_pb2

SETTINGS = EngineSettings.load(["--listen=unix:/none"], prog="engine", environ={})

PAIRS = {
    "num_requests_running": "requests_running",
    "num_requests_waiting": "requests_waiting",
    "kv_cache_usage_perc": "kv_usage_ratio",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "num_preemptions": "preemptions",
    "prompt_tokens": "prompt_tokens",
    "prompt_tokens_cached": "cached_tokens",
    "generation_tokens": "generated_tokens",
    "request_success": "choices",
    "corrupted_requests": "corrupted_requests",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "request_time_per_output_token_seconds": "time_per_output_token_seconds",
    "e2e_request_latency_seconds": "request_duration_seconds",
    "request_queue_time_seconds": "queue_seconds",
    "request_prefill_time_seconds": "prefill_seconds",
    "request_decode_time_seconds": "decode_seconds",
    "request_inference_time_seconds": "inference_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generated_tokens",
    "request_params_n": "request_choices",
    "request_params_max_tokens": "request_max_tokens",
    "iteration_tokens_total": "step_tokens",
}
"""vLLM's name and Kvern's, prefixes left out."""

INFO_ONLY = {"cache_config_info", "lora_requests_info"}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def metrics() -> EngineMetrics:
    """With a different count wherever two could be mixed up."""
    metrics = EngineMetrics(CollectorRegistry(), "tiny", None)
    info = replica_pb2.EngineInfo(model="tiny", block_size=16, num_blocks=40)
    thread = cast(EngineThread, SimpleNamespace(step_age_s=0.0, expected_step_s=0.0))
    metrics.start_serving(thread, cast(StallWatch, SimpleNamespace(is_stuck=False)), info)
    for number in range(3):
        add = engine_pb2.AddRequest(
            prompt_token_ids=range(11 * (number + 1)),
            sampling=inference_pb2.Sampling(n=1),
            stopping=inference_pb2.Stopping(max_tokens=500),
        )
        metrics.requests.add(add, {0: number})
        metrics.on_output(StepResult(scheduled=[FirstScheduled(number, cached_tokens=5)]))
    load = Load(num_running=3, num_waiting=2, num_used_blocks=10, num_failed_choices=1, num_preemptions=4)
    stats = StepStats(3, 77, 0.5, StepTimes())
    metrics.on_output(StepResult(request_ids=[0, 1, 2], token_ids=[7, 7, 7], load=load, step=stats))
    ended = [ChoiceEnded(0, FinishReason.STOP), ChoiceEnded(1, FinishReason.LENGTH)]
    metrics.on_output(StepResult(request_ids=[0, 1, 2], token_ids=[8, 8, 8], load=load, step=stats, ended=ended))
    metrics.requests.drop(2, FinishReason.ABORT)
    return metrics


def samples(collector: EngineMetrics | VllmMetrics, prefix: str) -> dict[str, Samples]:
    """Return what is scraped by family, its labels without those that tell which engine it is."""
    registry = CollectorRegistry()
    registry.register(collector)
    scraped: dict[str, Samples] = {}
    for family in text_string_to_metric_families(render(registry).decode()):
        name = family.name.removeprefix(prefix)
        assert name != family.name
        for sample in family.samples:
            labels = {"reason" if key == "finished_reason" else key: value for key, value in sample.labels.items()}
            told = frozenset((key, labels[key]) for key in labels.keys() - {"model", "model_name", "engine"})
            scraped.setdefault(name, {})[sample.name.removeprefix(family.name), told] = sample.value
    return scraped


def test_both_views_tell_the_same_value_for_value(metrics: EngineMetrics) -> None:
    ours = samples(metrics, "kvern_engine_")
    theirs = samples(VllmMetrics(CollectorRegistry(), metrics, SETTINGS), "vllm:")

    assert {name: theirs[name] for name in PAIRS} == {name: ours[own] for name, own in PAIRS.items()}
    assert theirs.keys() == PAIRS.keys() | INFO_ONLY
    assert all(sum(theirs[name].values()) > 0 for name in PAIRS)


def test_inference_extension_finds_block_size_and_number_of_blocks(metrics: EngineMetrics) -> None:
    registry = CollectorRegistry()
    VllmMetrics(registry, metrics, SETTINGS)
    text = render(registry).decode()
    [line] = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    for label in ('block_size="16"', 'num_gpu_blocks="40"', 'model_name="tiny"', 'engine="0"'):
        assert label in line
    assert 'enable_prefix_caching="True"' in line
    assert "# TYPE vllm:iteration_tokens_total histogram" in text
    assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 1.0' in text
    assert 'running_lora_adapters=""' in text


def test_setting_turns_vllm_names_off() -> None:
    assert SETTINGS.vllm_metrics
    assert not EngineSettings.load(["--listen=unix:/none", "--no-vllm-metrics"], prog="engine", environ={}).vllm_metrics
