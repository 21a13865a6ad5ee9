"""A step planned and launched before the last one's results are known gives what one planned after them gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvern.engine.request import SamplingParams

from .plain_model import END_TOKEN_ID
from .scheduler_harness import Engine


@dataclass(frozen=True)
class Arrival:
    step: int
    """Before which it arrives."""
    prompt: list[int]
    max_tokens: int
    abort_after: int | None
    is_poisoned: bool
    options: dict[str, Any] = field(hash=False)


samplings = st.builds(
    SamplingParams,
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logprobs=st.sampled_from([None, 0]),
)
# Few distinct prompts, so that prefixes are shared.
arrivals = st.builds(
    Arrival,
    step=st.integers(0, 20),
    prompt=st.builds(lambda branch, tail: [7] * branch + [3] * tail, st.integers(1, 10), st.integers(0, 10)),
    max_tokens=st.integers(0, 16),
    abort_after=st.sampled_from([None, None, 1, 3]),
    is_poisoned=st.sampled_from([False] * 7 + [True]),
    options=st.fixed_dictionaries(
        {
            "sampling": samplings,
            "grammar_tokens": st.sampled_from([None, 4, 12]),
            "prompt_logprobs": st.sampled_from([None, None, 0]),
            "stop_token_ids": st.sampled_from([frozenset(), frozenset(range(8))]),
            "n": st.sampled_from([1, 1, 3]),
        }
    ),
)
scripts = st.lists(arrivals, min_size=1, max_size=8)


def run(script: list[Arrival], *, depth: int, num_blocks: int) -> Engine:
    engine = Engine(
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=9,
        max_model_len=36,
        eos_token_ids=frozenset({END_TOKEN_ID}),
        depth=depth,
    )
    for step in range(21):
        for arrival in script:
            if arrival.step == step:
                arrive(engine, arrival)
        if engine.scheduler.has_work or engine.in_flight:
            engine.step()
    engine.run()
    return engine


def arrive(engine: Engine, arrival: Arrival) -> None:
    first = engine.add(arrival.prompt, arrival.max_tokens, **arrival.options)
    for number in range(first.request_id, first.request_id + arrival.options["n"]):
        if arrival.abort_after is not None:
            engine.abort_after[number] = arrival.abort_after
        if arrival.is_poisoned:
            engine.runner.poisoned.add(number)


def told(engine: Engine) -> tuple[object, ...]:
    ends = {number: (end.reason, end.stop_token_id, end.error) for number, end in engine.ended.items()}
    return engine.outputs, ends, engine.logprobs, engine.prompt_logprobs


_SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@_SETTINGS
@given(script=scripts)
def test_preempted_aborted_stopped_and_constrained_requests_give_the_same_at_either_depth(
    script: list[Arrival],
) -> None:
    at_once, ahead = (run(script, depth=depth, num_blocks=9) for depth in (0, 1))
    assert told(at_once) == told(ahead)


@_SETTINGS
@given(script=scripts.map(lambda script: [each for each in script if not each.is_poisoned]))
def test_cache_events_are_the_same_at_either_depth(script: list[Arrival]) -> None:
    """Of a pool that nothing is evicted from: what is evicted depends on the step it happens in."""
    at_once, ahead = (run(script, depth=depth, num_blocks=400) for depth in (0, 1))
    events = [sorted((e.digest, e.is_added) for e in engine.pool.take_events()) for engine in (at_once, ahead)]
    assert events[0] == events[1]
    assert len(events[0]) == len(at_once.pool.resident_digests)
