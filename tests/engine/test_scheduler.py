from __future__ import annotations

import pytest

from kvern.engine.errors import RequestRefused
from kvern.engine.request import FinishReason, RequestStatus, SamplingParams
from kvern.engine.scheduler import Policy

from .plain_model import expected_output, logprobs_of, scores
from .scheduler_harness import BLOCK_SIZE, Engine


def test_step_many_prompts_share_the_token_budget_in_order_of_arrival() -> None:
    engine = Engine(max_num_batched_tokens=10)
    for _ in range(3):
        engine.add(list(range(6)), bypass=True)
    plan, _ = engine.step()
    assert [entry.num_tokens for entry in plan.entries] == [6, 4]
    plan, _ = engine.step()
    assert [entry.num_tokens for entry in plan.entries] == [1, 2, 6]


def test_logprobs_of_a_token_beside_a_prompt_that_brings_none_are_told_with_it() -> None:
    engine = Engine(num_blocks=40, max_num_batched_tokens=40, max_model_len=120)
    engine.add(list(range(100)))
    told = engine.add([5], sampling=SamplingParams(logprobs=1))
    engine.run()
    expected = expected_output([5], 4)
    assert engine.outputs[told.request_id] == expected
    assert engine.logprobs[told.request_id] == [
        logprobs_of(scores([5, *expected[:place]]), token_id) for place, token_id in enumerate(expected)
    ]


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
    """Dedupe on commit: no_store requests follow nobody, and what a storing one computes at the same time is shared."""
    engine = Engine(max_num_batched_tokens=64)
    prompt = list(range(3 * BLOCK_SIZE))
    first = engine.add([*prompt[:-1], 99], max_tokens=8)
    engine.step()
    second = engine.add(prompt, max_tokens=8)
    engine.step()
    assert first.block_ids[:2] == second.block_ids[:2]
    engine.run()
    assert engine.outputs[second.request_id] == expected_output(prompt, 8)


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
    engine = Engine(max_num_seqs=1, policy=Policy.PRIORITY)
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
    assert result.load.queued_prefill_tokens == 6 + 7


def test_fcfs_policy_ignores_priority() -> None:
    engine = Engine(max_num_seqs=1)
    first = engine.add([1], max_tokens=1, priority=5)
    engine.add([2], max_tokens=1, priority=-1)
    plan, _ = engine.step()
    assert [entry.request for entry in plan.entries] == [first]


@pytest.mark.parametrize("depth", [0, 1])
def test_hundred_twins_of_a_cold_prompt_cost_one_prefill(depth: int) -> None:
    engine = Engine(num_blocks=600, max_num_seqs=128, max_num_batched_tokens=512, max_model_len=2400, depth=depth)
    prompt = [number % 50 for number in range(2000)]
    twins = [engine.add(prompt, max_tokens=1) for _ in range(100)]
    engine.run()
    assert engine.runner.num_computed_tokens <= 2000 + 99
    assert {tuple(engine.outputs[twin.request_id]) for twin in twins} == {tuple(expected_output(prompt, 1))}


def test_twin_whose_leader_is_aborted_goes_on_by_itself() -> None:
    engine = Engine(max_num_batched_tokens=4)
    prompt = list(range(16))
    leader, twin = engine.add(prompt), engine.add(prompt)
    engine.step()
    assert twin.status is RequestStatus.WAITING
    engine.scheduler.abort(leader.request_id)
    plan, _ = engine.step()
    assert [(entry.request, entry.start) for entry in plan.entries] == [(twin, 4)]
    engine.run()
    assert engine.outputs[twin.request_id] == expected_output(prompt, 4)


def test_follower_does_not_block_the_queue() -> None:
    engine = Engine(num_blocks=256, max_num_batched_tokens=64, max_model_len=400)
    prompt = list(range(300))
    engine.add(prompt)
    twin, other = engine.add(prompt), engine.add([9, 9])
    engine.step()
    plan, _ = engine.step()
    assert other in [entry.request for entry in plan.entries]
    assert twin.status is RequestStatus.WAITING


@pytest.mark.parametrize("options", [{"no_store": True}, {"bypass": True}, {"prompt_logprobs": 1}])
def test_requests_that_do_not_share_neither_lead_nor_follow(options: dict[str, object]) -> None:
    engine = Engine(max_num_batched_tokens=64)
    prompt = list(range(12))
    engine.add(prompt, **options)
    engine.add(prompt)
    engine.add(prompt, **options)
    plan, _ = engine.step()
    assert [entry.num_tokens for entry in plan.entries] == [12, 12, 12]


def test_leader_inherits_the_priority_of_its_follower() -> None:
    engine = Engine(policy=Policy.PRIORITY, max_num_batched_tokens=4, num_blocks=32)
    prompt = list(range(16))
    leader = engine.add(prompt, priority=5)
    engine.step()
    engine.add(prompt, priority=1)
    rival = engine.add([7] * 8, priority=3)
    plan, _ = engine.step()
    assert [entry.request for entry in plan.entries] == [leader]
    engine.run()
    assert engine.outputs[rival.request_id] == expected_output([7] * 8, 4)


def test_long_prompt_leaves_room_for_short_ones() -> None:
    """C09: ten tiny requests finish while one long prompt is still being computed."""
    engine = Engine(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=1200)
    long = engine.add([1] * 1000)
    tiny = [engine.add([2, number], max_tokens=2) for number in range(10)]
    while not all(each.request_id in engine.ended for each in tiny):
        engine.step()
    assert long.num_computed_tokens < long.num_prompt_tokens
    engine.run()
    assert engine.outputs[long.request_id] == expected_output([1] * 1000, 4)


def test_long_prompt_alone_gets_the_whole_budget() -> None:
    engine = Engine(num_blocks=64, max_num_seqs=1, max_num_batched_tokens=64, max_model_len=256)
    engine.add([1] * 100)
    engine.add([2] * 100)  # cannot be admitted beside it
    plan, _ = engine.step()
    assert [entry.num_tokens for entry in plan.entries] == [64]


def test_long_prompts_are_computed_one_after_another() -> None:
    engine = Engine(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=1200)
    first = engine.add([1] * 600)
    engine.step()
    second, longer = engine.add([2] * 600), engine.add([3] * 700)
    while left := 600 - first.num_computed_tokens:
        plan, _ = engine.step()
        assert [(entry.request, entry.num_tokens) for entry in plan.entries[:1]] == [(first, min(64, left))]
    assert second.num_computed_tokens + longer.num_computed_tokens < 64
    engine.run()
    assert set(engine.outputs) == {first.request_id, second.request_id, longer.request_id}


def test_decodes_behind_a_long_prompt_run_in_every_step() -> None:
    """C13."""
    engine = Engine(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=32, max_model_len=1200)
    engine.add([1] * 1000)
    engine.step()
    late = engine.add([2], max_tokens=30)
    while late.request_id not in engine.ended:
        plan, _ = engine.step()
        assert late in [entry.request for entry in plan.entries]


def test_step_time_target_bounds_the_prefill_beside_decodes() -> None:
    engine = Engine(
        num_blocks=2000, max_num_seqs=16, max_num_batched_tokens=4096, max_model_len=8000, target_step_s=0.05
    )
    engine.add([1], max_tokens=400)

    def step() -> int:
        """Return the prefill tokens of a step on a machine of 5 ms a step, 1 ms a decode, 0.1 ms a prefill token."""
        plan, _ = engine.step()
        engine.scheduler.observe(plan, 0.005 + 0.001 * plan.num_decodes + 0.0001 * plan.num_prefill_tokens)
        return plan.num_prefill_tokens

    for _ in range(3):
        step()
    long = engine.add([2] * 6000, max_tokens=2)
    chunks = []
    while long.num_computed_tokens < 6000:
        chunks.append(step())
    assert all(chunk <= 460 for chunk in chunks[2:])  # 440 tokens fit 50 ms
    assert max(chunks) >= 380


def test_step_time_target_with_nobody_decoding_takes_the_whole_budget() -> None:
    engine = Engine(num_blocks=2000, max_num_batched_tokens=4096, max_model_len=8000, target_step_s=0.05)
    engine.add([2] * 6000)
    plan, _ = engine.step()
    assert plan.num_tokens == 4096
