from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvern.engine.block_pool import BlockPool
from kvern.engine.errors import RequestRefused
from kvern.engine.plan import ChoiceEnded, Plan, StepResult
from kvern.engine.request import CacheParams, FinishReason, Request, SamplingParams, StoppingParams
from kvern.engine.scheduler import Scheduler

from .checked_runner import CheckedRunner, expected_output

BLOCK_SIZE = 4


@dataclass
class Engine:
    """Scheduler and checked runner in one, stepped by hand."""

    num_blocks: int = 16
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 16
    max_model_len: int = 64
    eos_token_ids: frozenset[int] = frozenset()
    caching: bool = True
    outputs: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, ChoiceEnded] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    ids: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.runner = CheckedRunner(self.num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.pool,
            block_size=BLOCK_SIZE,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            contract="test",
            enable_prefix_caching=self.caching,
        )

    def add(self, prompt: list[int], max_tokens: int = 4, *, priority: int = 0, **options: object) -> Request:
        cache = CacheParams(**{key: options.pop(key) for key in ("salt", "no_store", "bypass") if key in options})  # type: ignore[arg-type]
        number = next(self.ids)
        request = Request(
            number,
            list(prompt),
            len(prompt),
            SamplingParams(),
            StoppingParams(max_tokens, **options),  # type: ignore[arg-type]
            cache,
            priority=priority,
            arrival=number,
        )
        self.scheduler.add(request)
        self.outputs[number] = []
        return request

    def step(self) -> tuple[Plan, StepResult]:
        plan = self.scheduler.schedule()
        assert plan.entries, "no progress"
        assert plan.num_tokens <= self.max_num_batched_tokens
        assert len(plan.entries) <= self.max_num_seqs
        result = self.scheduler.commit(plan, self.runner.submit(plan).result())
        self.scheduler.check_integrity()
        for request_id, token_id in zip(result.request_ids, result.token_ids, strict=True):
            self.outputs[request_id].append(token_id)
        for scheduled in result.scheduled:
            assert scheduled.request_id not in self.cached
            self.cached[scheduled.request_id] = scheduled.cached_tokens
        for ended in result.ended:
            assert ended.request_id not in self.ended, "a choice ended twice"
            self.ended[ended.request_id] = ended
        return plan, result

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()
        assert self.pool.num_used == 0


def test_step_many_prompts_share_the_token_budget_in_order_of_arrival() -> None:
    engine = Engine(max_num_batched_tokens=10)
    for _ in range(3):
        engine.add(list(range(6)), bypass=True)
    plan, _ = engine.step()
    assert [entry.num_tokens for entry in plan.entries] == [6, 4]
    plan, _ = engine.step()
    assert [entry.num_tokens for entry in plan.entries] == [1, 2, 6]


def test_chunked_prompt_samples_only_at_its_end() -> None:
    engine = Engine(max_num_batched_tokens=7)
    request = engine.add(list(range(20)), max_tokens=1)
    samples = [engine.step()[0].entries[0].samples for _ in range(3)]
    assert samples == [False, False, True]
    assert engine.outputs[request.request_id] == expected_output(range(20), 1)


def test_sequence_budget_queues_the_rest() -> None:
    engine = Engine(max_num_seqs=2)
    requests = [engine.add([number], max_tokens=3) for number in range(5)]
    engine.run()
    assert engine.runner.max_entries == 2
    assert all(len(engine.outputs[request.request_id]) == 3 for request in requests)


def test_same_prompt_of_whole_blocks_reuses_all_but_its_last_token() -> None:
    """C17: hits of a prompt of exactly k blocks, and of its continuation."""
    engine = Engine()
    prompt = list(range(3 * BLOCK_SIZE))
    first = engine.add(prompt)
    engine.run()
    second = engine.add(prompt)
    engine.run()
    longer = engine.add([*prompt, 1, 2])
    engine.run()
    ids = (first.request_id, second.request_id, longer.request_id)
    assert [engine.cached[number] for number in ids] == [0, len(prompt) - 1, len(prompt)]
    assert engine.outputs[first.request_id] == engine.outputs[second.request_id] == expected_output(prompt, 4)


def test_generated_tokens_are_reused_by_the_next_turn() -> None:
    engine = Engine()
    prompt = list(range(6))
    first = engine.add(prompt, max_tokens=7)
    engine.run()
    second = engine.add(prompt + engine.outputs[first.request_id] + [9])
    engine.run()
    # 13 tokens, of which the last was sampled and never computed.
    assert engine.cached[second.request_id] == 12


def test_two_identical_running_prompts_end_up_sharing_blocks() -> None:
    engine = Engine(max_num_batched_tokens=64)
    prompt = list(range(3 * BLOCK_SIZE))
    twins = [engine.add(prompt, max_tokens=8) for _ in range(2)]
    engine.step()
    assert twins[0].block_ids[:3] == twins[1].block_ids[:3]
    engine.run()
    assert engine.outputs[0] == engine.outputs[1] == expected_output(prompt, 8)


@pytest.mark.parametrize("options", [{"salt": "x"}, {"bypass": True}])
def test_salt_and_bypass_see_no_blocks_of_others(options: dict[str, object]) -> None:
    engine = Engine()
    prompt = list(range(3 * BLOCK_SIZE))
    engine.add(prompt)
    engine.run()
    request = engine.add(prompt, **options)
    engine.run()
    assert engine.cached[request.request_id] == 0


@pytest.mark.parametrize("options", [{"no_store": True}, {"bypass": True}])
def test_no_store_and_bypass_leave_no_blocks_behind(options: dict[str, object]) -> None:
    engine = Engine()
    prompt = list(range(3 * BLOCK_SIZE))
    engine.add(prompt, **options)
    engine.run()
    request = engine.add(prompt)
    engine.run()
    assert engine.cached[request.request_id] == 0


def test_no_store_still_reuses() -> None:
    engine = Engine()
    prompt = list(range(3 * BLOCK_SIZE))
    engine.add(prompt)
    engine.run()
    request = engine.add(prompt, no_store=True)
    engine.run()
    assert engine.cached[request.request_id] == len(prompt) - 1


def test_prefix_caching_off_reuses_nothing() -> None:
    engine = Engine(caching=False)
    for _ in range(2):
        engine.add(list(range(12)))
        engine.run()
    assert engine.cached == {0: 0, 1: 0}


def test_tiny_pool_long_decodes_preempt_and_give_the_same_tokens() -> None:
    """C03, C04: progress in every step, bounded preemptions, and the oldest is never a victim."""
    engine = Engine(num_blocks=10, max_model_len=40)
    prompts = [[number, number + 1, number + 2] for number in range(4)]
    requests = [engine.add(prompt, max_tokens=20) for prompt in prompts]
    engine.run()
    for request, prompt in zip(requests, prompts, strict=True):
        assert engine.outputs[request.request_id] == expected_output(prompt, 20)
    assert requests[0].num_preemptions == 0
    assert 0 < sum(request.num_preemptions for request in requests) <= 12


def test_preempted_request_reports_the_hits_of_its_first_admission_only() -> None:
    """H03: recompute is no hit."""
    engine = Engine(num_blocks=10, max_model_len=40)
    requests = [engine.add([number] * 3, max_tokens=20) for number in range(4)]
    engine.run()
    assert any(request.num_preemptions for request in requests)
    assert set(engine.cached.values()) == {0}


def test_no_admission_in_a_step_that_preempted() -> None:
    """C06: the victim's blocks go to those who run, not to a newcomer who would be the next victim."""
    engine = Engine(num_blocks=7, max_model_len=28, max_num_batched_tokens=64)
    first, victim = (engine.add([number] * 9, max_tokens=12, priority=1) for number in range(2))
    while engine.pool.num_free:
        engine.step()
    newcomer = engine.add([9], max_tokens=2, priority=0)
    while not victim.num_preemptions:
        plan, _ = engine.step()
    assert [entry.request for entry in plan.entries] == [first]
    assert newcomer.num_cached_tokens is None
    engine.run()


def test_admission_waits_for_blocks_of_all_known_tokens() -> None:
    """C11: a prompt that does not fit beside what runs waits whole, instead of holding a part of the pool."""
    engine = Engine(num_blocks=10, max_model_len=40, max_num_batched_tokens=8)
    engine.add([1] * 20, max_tokens=4)
    long = engine.add([2] * 24, max_tokens=4)
    engine.step()
    assert long.block_ids == []
    engine.run()
    assert engine.outputs[long.request_id] == expected_output([2] * 24, 4)


def test_abort_of_everything_frees_the_pool_and_the_next_are_admitted() -> None:
    """C02, C24."""
    engine = Engine(num_blocks=8, max_model_len=32)
    requests = [engine.add([number] * 12, max_tokens=12) for number in range(8)]
    engine.step()
    for request in requests:
        engine.scheduler.abort(request.request_id)
    engine.scheduler.check_integrity()
    assert engine.pool.num_used == 0
    later = [engine.add([9, number], max_tokens=2) for number in range(6)]
    plan, _ = engine.step()
    assert [entry.request for entry in plan.entries] == later
    engine.scheduler.abort(12345)


def test_abort_tells_the_runner_once() -> None:
    engine = Engine()
    first, second = engine.add([1, 2]), engine.add([3, 4])
    engine.step()
    engine.scheduler.abort(first.request_id)
    plan, _ = engine.step()
    assert plan.removed_ids == [first.request_id]
    assert [entry.request for entry in plan.entries] == [second]
    assert engine.step()[0].removed_ids == []


def test_stop_token_ends_the_choice_and_is_among_its_tokens() -> None:
    prompt = [1, 2, 3]
    full = expected_output(prompt, 8)
    engine = Engine()
    request = engine.add(prompt, max_tokens=8, stop_token_ids=frozenset({full[2]}))
    engine.run()
    assert engine.outputs[request.request_id] == full[: full.index(full[2]) + 1]
    ended = engine.ended[request.request_id]
    assert (ended.reason, ended.stop_token_id) == (FinishReason.STOP, full[2])


def test_end_token_ends_the_choice_unless_ignored() -> None:
    prompt = [1, 2, 3]
    full = expected_output(prompt, 8)
    engine = Engine(eos_token_ids=frozenset({full[0]}))
    stops = engine.add(prompt, max_tokens=8)
    goes_on = engine.add(prompt, max_tokens=8, ignore_eos=True)
    engine.run()
    assert engine.outputs[stops.request_id] == full[:1]
    assert engine.outputs[goes_on.request_id] == full
    assert engine.ended[goes_on.request_id].reason is FinishReason.LENGTH


def test_add_of_what_can_never_fit_is_refused_and_queues_nothing() -> None:
    engine = Engine(num_blocks=4, max_model_len=16)
    with pytest.raises(RequestRefused, match=r"13 prompt tokens and max_tokens 4 make 17, the limit is 16") as refusal:
        engine.add([1] * 13, max_tokens=4)
    assert refusal.value.field == "stopping.max_tokens"
    assert not engine.scheduler.has_work


def test_lower_priority_value_is_admitted_first_and_preempted_last() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add([1], max_tokens=1, priority=5)
    urgent = engine.add([2], max_tokens=1, priority=-1)
    plan, _ = engine.step()
    assert [entry.request for entry in plan.entries] == [urgent]


def test_load_counts_running_waiting_blocks_and_queued_prefill() -> None:
    engine = Engine(max_num_seqs=1, max_num_batched_tokens=4)
    engine.add(list(range(10)))
    engine.add(list(range(20, 27)))
    _, result = engine.step()
    assert (result.load.num_running, result.load.num_waiting) == (1, 1)
    assert result.load.num_used_blocks == 3
    # 6 of the first prompt are left, of which the last one also samples; all 7 of the second wait.
    assert result.load.queued_prefill_tokens == 5 + 7


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, aborts and steps on a tiny pool. The checked runner sees to it that no request ever reads
    another's KV; each output must be what the plain model says, whatever happened in between."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(num_blocks=9, max_num_seqs=4, max_num_batched_tokens=9, max_model_len=36)
        self.prompts: dict[int, tuple[list[int], int]] = {}
        self.aborted: set[int] = set()

    # Few distinct prompts, so that prefixes are shared, dedupe and eviction happen.
    @rule(
        length=st.integers(1, 20),
        branch=st.integers(0, 20),
        max_tokens=st.integers(1, 16),
        priority=st.sampled_from([0, 0, 0, 1]),
        cache=st.sampled_from([{}, {}, {}, {"no_store": True}, {"bypass": True}, {"salt": "x"}]),
    )
    def arrive(self, length: int, branch: int, max_tokens: int, priority: int, cache: dict[str, object]) -> None:
        prompt = [7] * min(branch, length) + [3] * max(0, length - branch)
        request = self.engine.add(prompt, max_tokens, priority=priority, **cache)
        self.prompts[request.request_id] = (prompt, max_tokens)

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.engine.scheduler.has_work:
                self.engine.step()

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.engine.scheduler._requests)))
        self.engine.scheduler.abort(number)
        self.aborted.add(number)

    @invariant()
    def pool_and_requests_agree(self) -> None:
        self.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        self.engine.run()
        for number, (prompt, max_tokens) in self.prompts.items():
            expected = expected_output(prompt, max_tokens)
            if number in self.aborted:
                assert self.engine.outputs[number] == expected[: len(self.engine.outputs[number])]
            else:
                assert self.engine.outputs[number] == expected
                assert number in self.engine.ended


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
