"""The scheduler and its pool under random work, against a plain model."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvern.engine.request import FinishReason, SamplingParams
from kvern.engine.scheduler import Policy

from .plain_model import END_TOKEN_ID, PlainGrammar, expected_output
from .scheduler_harness import Engine


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, aborts, parking, forks, resets and steps on a tiny pool, at depth 0 and 1.

    The checked runner sees to it that no request ever reads another's KV; each output must be what the plain model
    says, whatever happened in between; and the cache's events add up to what is resident.
    """

    depth = 0

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(
            num_blocks=9,
            max_num_seqs=4,
            max_num_batched_tokens=9,
            max_model_len=36,
            eos_token_ids=frozenset({END_TOKEN_ID}),
            policy=Policy.PRIORITY,
            depth=self.depth,
        )
        self.expected: dict[int, list[int]] = {}
        self.aborted: set[int] = set()
        self.indexed: set[bytes] = set()

    # Few distinct prompts, so that prefixes are shared, dedupe and eviction happen.
    @rule(
        length=st.integers(1, 20),
        branch=st.integers(0, 20),
        max_tokens=st.integers(0, 16),
        priority=st.sampled_from([0, 0, 0, 1]),
        options=st.sampled_from([{}, {}, {}, {"no_store": True}, {"bypass": True}, {"salt": "x"}, {"n": 3}]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        stop=st.sampled_from([frozenset(), frozenset(range(5))]),
        sampling=st.sampled_from([SamplingParams(), SamplingParams(frequency_penalty=0.5)]),
        grammar_tokens=st.sampled_from([None, None, 4, 12]),
    )
    def arrive(
        self,
        length: int,
        branch: int,
        max_tokens: int,
        priority: int,
        options: dict[str, Any],
        prompt_logprobs: int | None,
        stop: frozenset[int],
        sampling: SamplingParams,
        grammar_tokens: int | None,
    ) -> None:
        prompt = [7] * min(branch, length) + [3] * max(0, length - branch)
        first = self.engine.add(
            prompt,
            max_tokens,
            priority=priority,
            prompt_logprobs=prompt_logprobs,
            sampling=sampling,
            grammar_tokens=grammar_tokens,
            stop_token_ids=stop,
            **options,
        )
        grammar = None if grammar_tokens is None else PlainGrammar(grammar_tokens)
        expected = expected_output(prompt, max_tokens, stop | {END_TOKEN_ID}, sampling=sampling, grammar=grammar)
        for number in range(first.request_id, first.request_id + options.get("n", 1)):
            self.expected[number] = expected

    @precondition(lambda self: self.engine.scheduler.has_work or self.engine.in_flight)
    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.engine.scheduler.has_work or self.engine.in_flight:
                self.engine.step()

    @precondition(lambda self: self.engine.scheduler._requests)
    @rule(data=st.data(), what=st.sampled_from(["abort", "park", "park", "unpark", "unpark"]))
    def disturb(self, data: st.DataObject, what: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.engine.scheduler._requests)))
        getattr(self.engine.scheduler, what)(number)
        if what == "abort":
            self.aborted.add(number)

    @rule()
    def reset_cache(self) -> None:
        self.engine.scheduler.reset_cache()

    @precondition(lambda self: self.engine.scheduler._requests)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.engine.runner.poisoned.add(data.draw(st.sampled_from(sorted(self.engine.scheduler._requests))))

    @invariant()
    def pool_and_requests_agree(self) -> None:
        self.engine.scheduler.check_integrity()

    @invariant()
    def events_add_up_to_what_is_resident(self) -> None:
        for event in self.engine.pool.take_events():
            assert (event.digest in self.indexed) != event.is_added
            if event.is_added:
                self.indexed.add(event.digest)
            else:
                self.indexed.remove(event.digest)
        assert self.indexed == set(self.engine.pool.resident_digests)

    def teardown(self) -> None:
        for number in list(self.engine.scheduler._requests):
            self.engine.scheduler.unpark(number)
        self.engine.run()
        for number, expected in self.expected.items():
            output = self.engine.outputs[number]
            if number in self.aborted:
                assert output == expected[: len(output)]
            elif self.engine.ended[number].reason is FinishReason.ERROR:
                assert number in self.engine.runner.poisoned
                assert output == expected[: len(output)]
            else:
                assert output == expected


class DeeperMachine(SchedulerMachine):
    depth = 1


# About 10,000 steps at either depth; `python -m tests.engine.soak` runs more.
SETTINGS = settings(
    max_examples=130, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSchedulerMachine = SchedulerMachine.TestCase
TestDeeperMachine = DeeperMachine.TestCase
TestSchedulerMachine.settings = TestDeeperMachine.settings = SETTINGS
