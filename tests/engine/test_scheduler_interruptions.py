"""What happens to requests while they run: parking, forks, aborts, resets, failures, steps in flight."""

from __future__ import annotations

import pytest

from kvern.engine import block_tables
from kvern.engine.block_hash import extend_digests
from kvern.engine.request import FinishReason
from kvern.engine.scheduler import Policy

from .plain_model import PlainGrammar, expected_output
from .scheduler_harness import BLOCK_SIZE, Engine


@pytest.mark.parametrize("depth", [0, 1])
def test_parked_request_stands_still_and_goes_on_where_it_was(depth: int) -> None:
    engine = Engine(depth=depth)
    parked, other = engine.add([1, 2, 3], max_tokens=12), engine.add([4], max_tokens=12)
    engine.step()
    engine.step()
    engine.scheduler.park(parked.request_id)
    engine.scheduler.park(parked.request_id)
    before = engine.runner.num_computed_tokens
    while other.request_id not in engine.ended:
        engine.step()
    assert len(engine.outputs[parked.request_id]) <= 2
    assert engine.runner.num_computed_tokens - before <= 12
    assert not engine.scheduler.has_work
    assert parked.block_ids
    engine.scheduler.unpark(parked.request_id)
    engine.scheduler.unpark(parked.request_id)
    engine.run()
    assert engine.outputs[parked.request_id] == expected_output([1, 2, 3], 12)
    assert parked.num_preemptions == 0


def test_parked_request_is_the_first_victim_whatever_its_age() -> None:
    engine = Engine(num_blocks=6, max_model_len=24)
    oldest = engine.add([1] * 9, max_tokens=12)
    engine.step()
    engine.scheduler.park(oldest.request_id)
    young = engine.add([2] * 3, max_tokens=20)
    while young.request_id not in engine.ended:
        engine.step()
    assert (oldest.num_preemptions, young.num_preemptions) == (1, 0)
    engine.scheduler.unpark(oldest.request_id)
    engine.run()
    assert engine.outputs[oldest.request_id] == expected_output([1] * 9, 12)


def test_abort_of_a_parked_request_frees_its_blocks() -> None:
    engine = Engine()
    request = engine.add([1] * 9)
    engine.step()
    engine.scheduler.park(request.request_id)
    engine.scheduler.abort(request.request_id)
    assert engine.pool.num_used == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("length", [1, 8, 9, 11])
@pytest.mark.parametrize("options", [{}, {"bypass": True}, {"no_store": True}])
def test_choices_share_the_prompt_and_copy_its_partial_block(
    depth: int, length: int, options: dict[str, object]
) -> None:
    engine = Engine(num_blocks=40, depth=depth)
    prompt = list(range(length))
    first = engine.add(prompt, max_tokens=6, n=4, **options)
    engine.run()
    assert [engine.outputs[number] for number in range(4)] == [expected_output(prompt, 6)] * 4
    assert engine.cached == {first.request_id: 0}
    # One prompt, the last prompt token again for three choices, and five decodes each.
    assert engine.runner.num_computed_tokens == length + 3 + 4 * 5
    assert engine.runner.num_copies == (3 if length % BLOCK_SIZE else 0)


def test_choice_left_alone_with_a_cached_block_does_not_write_into_it() -> None:
    """The first choice had filled the block before the other one came to share its beginning."""
    engine = Engine(max_num_seqs=2)
    engine.add([9], max_tokens=3)  # keeps the other choice from running
    first = engine.add([1, 2], max_tokens=5, n=2)
    other = engine.scheduler._requests[first.request_id + 1]
    other.grammar = PlainGrammar(9)  # so that it draws other tokens
    for _ in range(4):
        engine.step()
    assert other.block_ids == first.block_ids[:1]
    engine.scheduler.park(other.request_id)
    while first.request_id not in engine.ended:
        engine.step()
    engine.scheduler.unpark(other.request_id)
    engine.run()
    assert engine.outputs[other.request_id] != engine.outputs[first.request_id]
    again = engine.add([1, 2, *engine.outputs[first.request_id]])
    engine.run()
    assert engine.cached[again.request_id] == BLOCK_SIZE


def test_aborted_first_choice_leaves_the_others_whole() -> None:
    """C25."""
    engine = Engine(num_blocks=40)
    prompt = list(range(10))
    first = engine.add(prompt, max_tokens=6, n=3)
    engine.step()
    engine.step()
    engine.scheduler.abort(first.request_id)
    engine.run()
    assert [engine.outputs[number] for number in (1, 2)] == [expected_output(prompt, 6)] * 2


def test_reset_forgets_everything_and_running_requests_leave_nothing_behind() -> None:
    engine = Engine()
    prompt = list(range(12))
    engine.add(prompt, max_tokens=8)
    engine.step()
    engine.scheduler.reset_cache()
    engine.run()
    again = engine.add(prompt)
    engine.run()
    once_more = engine.add(prompt)
    engine.run()
    assert (engine.cached[again.request_id], engine.cached[once_more.request_id]) == (0, 11)


@pytest.mark.parametrize("depth", [0, 1])
def test_failed_logits_end_the_choice_and_its_blocks_leave_the_cache(depth: int) -> None:
    """D18."""
    engine = Engine(depth=depth, num_blocks=32)
    shared, prompt = list(range(8)), [*range(8), 40, 41, 42, 43, 44]
    engine.add(shared)
    engine.run()
    bad = engine.add(prompt, max_tokens=20)
    engine.step()
    follower = engine.add([*prompt, 45], max_tokens=16)
    engine.step()
    engine.runner.poisoned.add(bad.request_id)
    engine.run()
    assert engine.ended[bad.request_id].reason is FinishReason.ERROR
    assert engine.ended[bad.request_id].error == "logits are not numbers"
    assert engine.ended[bad.request_id].error_reason == ""
    assert engine.outputs[follower.request_id] == expected_output([*prompt, 45], 16)
    again = engine.add(prompt)
    engine.run()
    assert engine.cached[again.request_id] == 8


def test_zero_max_tokens_runs_the_prompt_and_gives_no_token() -> None:
    engine = Engine(max_num_batched_tokens=4)
    request = engine.add([1] * 10, max_tokens=0)
    engine.run()
    assert engine.outputs[request.request_id] == []
    assert engine.ended[request.request_id].reason is FinishReason.LENGTH
    assert engine.runner.num_computed_tokens == 10


def test_prompt_logprobs_computes_cached_positions_again() -> None:
    """C14."""
    engine = Engine()
    prompt = list(range(2 * BLOCK_SIZE + 1))
    for _ in range(2):
        request = engine.add(prompt, prompt_logprobs=1)
        engine.run()
        assert engine.cached[request.request_id] == 0
    plain = engine.add(prompt)
    engine.run()
    assert engine.cached[plain.request_id] == 8


@pytest.mark.parametrize("depth", [0, 1])
def test_stop_token_at_any_depth_gives_no_token_after_it(depth: int) -> None:
    prompt = [1, 2, 3]
    stop = expected_output(prompt, 8)[2]
    engine = Engine(depth=depth)
    request = engine.add(prompt, max_tokens=8, stop_token_ids=frozenset({stop}))
    engine.run()
    assert engine.outputs[request.request_id] == expected_output(prompt, 8, frozenset({stop}))


def test_victim_in_flight_keeps_the_token_it_was_drawing() -> None:
    engine = Engine(num_blocks=10, max_model_len=40, depth=1)
    prompts = [[number, number + 1, number + 2] for number in range(4)]
    requests = [engine.add(prompt, max_tokens=20) for prompt in prompts]
    engine.run()
    for request, prompt in zip(requests, prompts, strict=True):
        assert engine.outputs[request.request_id] == expected_output(prompt, 20)
    assert sum(request.num_preemptions for request in requests) > 0


def test_equals_in_a_tiny_pool_take_turns_and_nobody_starves() -> None:
    """C08: whoever is preempted comes back in its order, before those who arrived after it."""
    engine = Engine(num_blocks=12, max_model_len=48, policy=Policy.PRIORITY)
    requests = [engine.add([number] * 5, max_tokens=24) for number in range(12)]
    engine.run()
    assert sum(request.num_preemptions for request in requests) > 0
    assert [engine.outputs[number] for number in range(12)] == [expected_output([n] * 5, 24) for n in range(12)]
    assert list(engine.ended) == list(range(12))


@pytest.mark.parametrize("depth", [0, 1])
def test_many_aborts_over_a_shared_prefix_leave_nothing_and_corrupt_nothing(depth: int) -> None:
    """C26, C25: choices of one prompt go one by one, some at every stage; the rest read only what is theirs."""
    engine = Engine(num_blocks=14, max_model_len=48, depth=depth)
    prefix = [7] * 10
    for number in range(40):
        first = engine.add([*prefix, number % 3], max_tokens=16, n=1 + number % 3)
        for _ in range(number % 4):
            engine.step()
        engine.scheduler.abort(first.request_id - number % 2)
    aborted = set(engine.outputs) - set(engine.scheduler._requests) - set(engine.ended)
    engine.run()
    assert len(aborted) >= 10
    for number, request in enumerate(engine.outputs.values()):
        assert number in aborted or len(request) == 16
    assert engine.pool.num_free == 14


def test_blocks_of_prompts_whose_digests_collide_are_told_apart_by_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C23: with digests of 4 bits the checked device finds another prompt's KV, so the whole strength is the digest's:
    128 bits, a chance of 2^-49 that any two of 2^40 blocks collide."""

    def few_digests(parent: bytes, token_ids: list[int], block_size: int, *, key: bytes) -> list[bytes]:
        return [bytes([digest[0] & 15]) for digest in extend_digests(parent, token_ids, block_size, key=key)]

    def run_prompts() -> None:
        engine = Engine(num_blocks=200)
        for number in range(40):
            engine.add([number] * 9, max_tokens=1)
            engine.run()

    run_prompts()
    monkeypatch.setattr(block_tables, "extend_digests", few_digests)
    with pytest.raises(AssertionError, match="another prompt's KV"):
        run_prompts()
