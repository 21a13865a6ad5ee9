"""What is counted of each request, told step by step."""

from __future__ import annotations

import time

import pytest

from kvern.engine.plan import ChoiceEnded, FirstScheduled, StepResult
from kvern.engine.request import FinishReason
from kvern.services.engine.request_stats import RequestStats
from kvern.services.engine.stats import EngineStats
from kvern.v1 import engine_pb2, inference_pb2

ROUNDING_S = 1e-6
"""Of the sum of an hour and some microseconds."""


@pytest.fixture
def stats() -> EngineStats:
    return EngineStats()


@pytest.fixture
def requests(stats: EngineStats) -> RequestStats:
    return RequestStats(stats)


def add(requests: RequestStats, *numbers: int, prompt_len: int = 10, arrived_ns: int = 0, bypass: bool = False) -> None:
    """Add a request with a choice for each number."""
    message = engine_pb2.AddRequest(
        prompt_token_ids=range(prompt_len),
        sampling=inference_pb2.Sampling(n=len(numbers)),
        stopping=inference_pb2.Stopping(max_tokens=20),
        cache=inference_pb2.Cache(bypass=bypass),
        arrived_ns=arrived_ns,
    )
    requests.add(message, dict(enumerate(numbers)))


def schedule(requests: RequestStats, number: int, cached_tokens: int = 0) -> None:
    requests.take(StepResult(scheduled=[FirstScheduled(number, cached_tokens)]))


def step(requests: RequestStats, *numbers: int, ended: tuple[int, ...] = ()) -> None:
    """Tell of a token of each choice, the last one of those that ended."""
    ends = [ChoiceEnded(number, FinishReason.LENGTH) for number in ended]
    requests.take(StepResult(request_ids=list(numbers), token_ids=[1] * len(numbers), ended=ends))


def test_request_is_timed_from_its_arrival_stamp(stats: EngineStats, requests: RequestStats) -> None:
    add(requests, 1, arrived_ns=time.monotonic_ns() - 3_600 * 10**9)
    schedule(requests, 1)
    step(requests, 1)
    step(requests, 1)
    step(requests, 1, ended=(1,))
    for histogram in (stats.queue_s, stats.time_to_first_token_s, stats.duration_s):
        assert histogram.count == 1
        assert histogram.sum >= 3600
    for histogram in (stats.prefill_s, stats.decode_s, stats.inference_s, stats.time_per_output_token_s):
        assert histogram.count == 1
        assert 0 < histogram.sum < 3600
    assert stats.inter_token_s.count == 2
    assert stats.inter_token_s.sum == pytest.approx(stats.decode_s.sum)
    assert stats.inference_s.sum == pytest.approx(stats.prefill_s.sum + stats.decode_s.sum)
    assert stats.duration_s.sum >= stats.queue_s.sum + stats.inference_s.sum - ROUNDING_S
    assert stats.time_per_output_token_s.sum == pytest.approx(stats.decode_s.sum / 2)
    assert len(requests) == 0


def test_stamp_from_the_future_is_taken_for_now(stats: EngineStats, requests: RequestStats) -> None:
    add(requests, 1, arrived_ns=time.monotonic_ns() + 3_600 * 10**9)
    schedule(requests, 1)
    assert 0 <= stats.queue_s.sum < 3600


def test_choices_of_one_request_are_observed_as_one(stats: EngineStats, requests: RequestStats) -> None:
    """The first token is that of the choice that is first, the end that of the last one."""
    add(requests, 1, 2, 3)
    schedule(requests, 1)
    step(requests, 1)
    step(requests, 1, 2, 3, ended=(1,))
    assert stats.duration_s.count == 0
    step(requests, 2, 3, ended=(2,))
    step(requests, 3, ended=(3,))
    once = (stats.queue_s, stats.time_to_first_token_s, stats.duration_s, stats.decode_s, stats.request_prompt_tokens)
    assert [histogram.count for histogram in once] == [1] * 5
    assert (stats.request_choices.sum, stats.request_max_tokens.sum) == (3, 20)
    assert stats.request_generated_tokens.sum == 7
    assert stats.time_per_output_token_s.sum == pytest.approx(stats.decode_s.sum / 2)
    assert stats.choices["length"] == 3
    assert stats.inter_token_s.count == 4


def test_aborted_choices_are_counted_once_and_as_aborts(stats: EngineStats, requests: RequestStats) -> None:
    """H02: what the engine still says of them, from a step that was under way, changes nothing."""
    for number in range(5):
        add(requests, number)
        schedule(requests, number)
    step(requests, *range(5))
    for number in range(5):
        requests.drop(number, FinishReason.ABORT)
    step(requests, *range(5), ended=tuple(range(5)))
    assert stats.choices == {"stop": 0, "length": 0, "abort": 5, "error": 0}
    assert stats.duration_s.count == 0
    assert len(requests) == 0


def test_request_refused_is_neither_choice_nor_abort(stats: EngineStats, requests: RequestStats) -> None:
    add(requests, 1, 2)
    requests.refuse(1)
    requests.refuse(2)
    requests.drop(1, FinishReason.ABORT)
    assert stats.refused == 1
    assert sum(stats.choices.values()) == 0
    assert len(requests) == 0


def test_request_that_may_not_read_the_cache_asks_nothing_of_it(stats: EngineStats, requests: RequestStats) -> None:
    add(requests, 1, prompt_len=30, bypass=True)
    schedule(requests, 1)
    assert (stats.prompt_tokens, stats.prefix_cache_queries) == (30, 0)
    add(requests, 2, prompt_len=40)
    schedule(requests, 2, cached_tokens=32)
    assert (stats.prompt_tokens, stats.cached_tokens) == (70, 32)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (40, 32)
