"""A detokenizer process in front of an engine that does what the test says."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest

from kvern.v1 import engine_pb2, inference_pb2, replica_pb2

from .scripted_engine import EOS, INFO, MAX_MODEL_LEN, VOCAB_SIZE, ScriptedEngine
from .setup import MAX_STREAMS, NOT_SERVING, SERVING, TIMEOUT_S, Setup, details_of, detokenizing, finished_of, text_of

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_request_reaches_the_engine_as_asked_and_its_answer_the_client(setup: Setup) -> None:
    call = setup.serve(
        prompt=[5, 6],
        stopping=inference_pb2.Stopping(max_tokens=3, stop=["never"], stop_token_ids=[11]),
        cache=inference_pb2.Cache(salt="s"),
        priority=-2,
    )
    started = (await call.next()).started
    assert (started.request_id, started.model, started.prompt_tokens, started.seed) == ("r", "tiny", 2, 9)
    add = await setup.engine.added.get()
    assert (list(add.prompt_token_ids), add.sampling.seed, add.cache.salt, add.priority) == ([5, 6], 9, "s", -2)
    assert (add.stopping.max_tokens, list(add.stopping.stop), list(add.stopping.stop_token_ids)) == (3, [], [11])
    setup.engine.step(scheduled=[engine_pb2.FirstScheduled(id=add.id, cached_tokens=1)])
    scheduled = (await call.next()).scheduled
    assert scheduled.cached_tokens == 1
    assert scheduled.queue_s > 0
    ids = setup.ids(" one two three")
    for token_id in ids:
        setup.engine.step([add.id], [token_id])
    setup.engine.end(add.id, preemptions=2)
    events = await call.rest()
    finished = finished_of(events)
    assert text_of(events) == " one two three"
    assert finished.reason == inference_pb2.FINISH_REASON_LENGTH
    usage = finished.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (2, 1, 3)
    assert call.cached_tokens == [1]
    timing = finished.timing
    assert timing.preemptions == 2
    assert timing.queue_s == scheduled.queue_s <= timing.time_to_first_token_s <= timing.total_s


async def test_router_learns_of_every_token_and_of_the_bytes_sent(setup: Setup) -> None:
    call, request_id = await setup.begin()
    ids = setup.ids("é日本 ok")
    for token_id in ids:
        setup.engine.step([request_id], [token_id])
    setup.engine.end(request_id)
    events = await call.rest()
    assert [id for update in call.updates for id in update.new_token_ids] == ids
    assert call.updates[-1].text_bytes_total == len(text_of(events).encode()) == len("é日本 ok".encode())
    assert [update.finished for update in call.updates] == [False] * (len(call.updates) - 1) + [True]


async def test_incomplete_character_is_not_sent_before_it_is_whole(setup: Setup) -> None:
    """A02: with token ids asked for, a delta without text tells of each token."""
    call, request_id = await setup.begin(output=inference_pb2.Output(token_ids=True))
    ids = setup.ids("😀")
    deltas = []
    for token_id in ids:
        setup.engine.step([request_id], [token_id])
        deltas.append((await call.next()).delta)
    assert [delta.text for delta in deltas] == [*[""] * (len(ids) - 1), "😀"]
    assert [list(delta.token_ids) for delta in deltas] == [[token_id] for token_id in ids]
    setup.engine.end(request_id)
    await call.rest()


async def test_character_that_never_completes_is_replaced_at_the_end(setup: Setup) -> None:
    """A29, E19: what is no whole character never reaches a string field."""
    call, request_id = await setup.begin()
    setup.engine.step([request_id], setup.ids("😀")[:1])
    setup.engine.end(request_id)
    assert text_of(await call.rest()) == "\ufffd"


async def test_merged_steps_of_several_requests_are_told_apart(setup: Setup) -> None:
    first, second = await setup.begin(), await setup.begin()
    one, two = setup.ids(" one one"), setup.ids(" two")
    setup.engine.step([first[1], second[1], 10**6], [*one, *two, 5, 5], num_tokens=[len(one), len(two), 2])
    setup.engine.end(first[1])
    setup.engine.end(second[1])
    assert [text_of(await call.rest()) for call, _ in (first, second)] == [" one one", " two"]


async def test_stop_string_over_several_tokens_cuts_and_aborts(setup: Setup) -> None:
    """A08, A10: no part of it is shown, tokens after it do not count."""
    call, request_id = await setup.begin(stopping=inference_pb2.Stopping(stop=["beta gamma", "gamma"]))
    ids = setup.ids("alpha beta gamma delta")
    setup.engine.step([request_id] * len(ids), ids)
    events = await call.rest()
    assert text_of(events) == "alpha "
    finished = finished_of(events)
    assert (finished.reason, finished.stop) == (inference_pb2.FINISH_REASON_STOP, "beta gamma")
    assert finished.usage.completion_tokens == len(setup.ids("alpha beta gamma")) < len(ids)
    assert await setup.aborted() == request_id


async def test_choices_come_complete_and_stop_each_by_itself(setup: Setup) -> None:
    """A24, A25: one that was stopped may have ended in the engine in the meantime."""
    sampling = inference_pb2.Sampling(seed=9, n=4)
    call, request_id = await setup.begin(sampling=sampling, stopping=inference_pb2.Stopping(stop=["beta"]))
    texts = ["one two", "alpha beta gamma", "three", "bet"]
    ids = [setup.ids(text) for text in texts]
    setup.engine.step(
        [request_id] * 4, [id for each in ids for id in each], choices=range(4), num_tokens=list(map(len, ids))
    )
    while (event := await call.next()).finished.stop != "beta":
        assert "beta" not in event.delta.text
    assert await setup.aborted() == request_id
    for index in (1, 0, 2, 3):
        setup.engine.end(request_id, index=index)
    events = await call.rest()
    assert sorted(event.finished.index for event in events if event.HasField("finished")) == [0, 2, 3]
    assert [sum(len(each.new_token_ids) for each in call.updates if each.index == index) for index in range(4)] == [
        len(ids[0]), len(setup.ids("alpha beta")), len(ids[2]), len(ids[3]),
    ]  # fmt: skip


async def test_stray_byte_is_replaced_and_the_rest_goes_on(setup: Setup) -> None:
    """A30."""
    stray = setup.ids("日")[-1]
    call, request_id = await setup.begin(sampling=inference_pb2.Sampling(seed=9, logit_bias={stray: 100.0}))
    ids = [*setup.ids("a"), stray, *setup.ids(" 日 b")]
    setup.engine.step([request_id] * len(ids), ids)
    setup.engine.end(request_id)
    assert text_of(await call.rest()) == "a\ufffd 日 b"


async def test_deadline_that_the_queue_does_not_leave_is_refused_at_once(setup: Setup) -> None:
    def load(queued: int) -> replica_pb2.ReplicaLoad:
        return replica_pb2.ReplicaLoad(queued_prefill_tokens=queued)

    setup.engine.step(load=load(2000))
    await setup.load_becomes(load(2000))
    call, request_id = await setup.begin()
    await asyncio.sleep(0.1)  # a known wait behind 2,000 tokens
    setup.engine.step(scheduled=[engine_pb2.FirstScheduled(id=request_id)], load=load(10**7))
    await setup.load_becomes(load(10**7))
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await setup.serve(timeout_s=5).rest()
    reason, delay_s = details_of(refusal.value)
    assert (refusal.value.code(), reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "DEADLINE_UNREACHABLE")
    assert delay_s is not None
    assert delay_s > 10
    setup.engine.step(load=load(0))
    await setup.load_becomes(load(0))
    setup.engine.end(request_id)
    await call.rest()
    call, request_id = await setup.begin()
    setup.engine.end(request_id)
    await call.rest()


async def test_stop_string_is_kept_where_asked_for(setup: Setup) -> None:
    call, request_id = await setup.begin(stopping=inference_pb2.Stopping(stop=["beta"], include_stop=True))
    ids = setup.ids("alpha beta gamma")
    setup.engine.step([request_id] * len(ids), ids)
    assert text_of(await call.rest()) == "alpha beta"


async def test_beginning_of_a_stop_string_is_held_back_until_it_is_none(setup: Setup) -> None:
    """A13."""
    call, request_id = await setup.begin(stopping=inference_pb2.Stopping(stop=["two three"]))
    shown = []
    for word in (" one", " two", " four"):
        setup.engine.step([request_id], setup.ids(word))
        shown.append((await call.next()).delta.text)
    assert shown == [" one", " ", "two four"]
    setup.engine.end(request_id)
    await call.rest()


async def test_text_held_back_is_shown_at_the_end(setup: Setup) -> None:
    call, request_id = await setup.begin(stopping=inference_pb2.Stopping(stop=["two three"]))
    setup.engine.step([request_id] * 2, setup.ids(" one two"))
    setup.engine.end(request_id)
    assert text_of(await call.rest()) == " one two"


@pytest.mark.parametrize(
    ("skip", "include", "text"),
    [(None, False, "Hi"), (True, True, "Hi"), (False, False, "Hi"), (False, True, "Hi<|im_end|>")],
)
async def test_end_token_is_shown_only_where_special_tokens_and_stops_are(
    setup: Setup, skip: bool | None, include: bool, text: str
) -> None:
    output, stopping = inference_pb2.Output(skip_special_tokens=skip), inference_pb2.Stopping(include_stop=include)
    call, request_id = await setup.begin(output=output, stopping=stopping)
    end = engine_pb2.ChoiceEnd(id=request_id, reason=inference_pb2.FINISH_REASON_STOP, stop_token_id=EOS)
    setup.engine.step([request_id] * 2, [*setup.ids("Hi"), EOS], ended=[end])
    events = await call.rest()
    finished = finished_of(events)
    assert text_of(events) == text
    assert (finished.reason, finished.stop_token_id) == (inference_pb2.FINISH_REASON_STOP, EOS)
    assert finished.usage.completion_tokens == 2


@pytest.mark.parametrize(("include_stop", "text"), [(False, "Hi"), (True, "Hi there")])
async def test_stop_token_that_is_a_word_is_shown_only_where_asked_for(
    setup: Setup, include_stop: bool, text: str
) -> None:
    [there] = setup.ids(" there")
    stopping = inference_pb2.Stopping(stop_token_ids=[there], include_stop=include_stop)
    call, request_id = await setup.begin(stopping=stopping)
    end = engine_pb2.ChoiceEnd(id=request_id, reason=inference_pb2.FINISH_REASON_STOP, stop_token_id=there)
    setup.engine.step([request_id] * 2, [*setup.ids("Hi"), there], ended=[end])
    assert text_of(await call.rest()) == text


async def test_choice_that_failed_says_why_and_ends_ok(setup: Setup) -> None:
    call, request_id = await setup.begin()
    setup.engine.end(request_id, inference_pb2.FINISH_REASON_ERROR, error="logits are not numbers")
    finished = finished_of(await call.rest())
    assert (finished.reason, finished.error) == (inference_pb2.FINISH_REASON_ERROR, "logits are not numbers")


async def test_engines_refusal_is_an_invalid_argument(setup: Setup) -> None:
    call, request_id = await setup.begin()
    refusal = engine_pb2.Refusal(field="stopping.max_tokens", message="does not fit")
    setup.engine.step(ended=[engine_pb2.ChoiceEnd(id=request_id, refusal=refusal)])
    code, message = await call.error()
    assert (code, message) == (grpc.StatusCode.INVALID_ARGUMENT, "stopping.max_tokens: does not fit")


async def test_prompt_up_to_the_limit_gives_one_token_and_a_longer_one_an_error(setup: Setup) -> None:
    """B21."""
    call = setup.serve(prompt=[5] * (MAX_MODEL_LEN - 1))
    await call.next()
    add = await setup.engine.added.get()
    assert add.stopping.max_tokens == 1
    setup.engine.end(add.id)
    await call.rest()
    for length in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1):
        code, message = await setup.serve(prompt=[5] * length).error()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert message.startswith(f"prompt: {length} tokens, the limit is {MAX_MODEL_LEN}")


async def test_max_tokens_beyond_the_context_is_an_error_naming_both(setup: Setup) -> None:
    """B17."""
    code, message = await setup.serve(prompt=[5] * 60, stopping=inference_pb2.Stopping(max_tokens=5)).error()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message.startswith("stopping.max_tokens: 5 tokens after a prompt of 60")
    assert str(MAX_MODEL_LEN) in message


async def test_max_tokens_absent_is_what_the_context_still_holds(setup: Setup) -> None:
    """B20."""
    call = setup.serve(prompt=[5] * 10)
    await call.next()
    add = await setup.engine.added.get()
    assert add.stopping.max_tokens == MAX_MODEL_LEN - 10
    setup.engine.end(add.id)
    await call.rest()


@pytest.mark.parametrize("bad", [VOCAB_SIZE, 2**32 - 1])
async def test_ids_outside_the_vocabulary_are_refused_naming_the_field(setup: Setup, bad: int) -> None:
    """B09, D06."""
    code, message = await setup.serve(prompt=[5, bad]).error()
    assert (code, message[:17]) == (grpc.StatusCode.INVALID_ARGUMENT, "token_ids.ids[1]:")
    code, message = await setup.serve(stopping=inference_pb2.Stopping(stop_token_ids=[bad])).error()
    assert (code, message[:28]) == (grpc.StatusCode.INVALID_ARGUMENT, "stopping.stop_token_ids[0]: ")


async def test_cancelled_call_is_aborted_and_its_neighbour_goes_on(setup: Setup) -> None:
    """E01, E03."""
    gone, neighbour = await setup.begin(), await setup.begin()
    setup.engine.step([gone[1], neighbour[1]], [5, 6])
    gone[0].call.cancel()
    assert await setup.aborted() == gone[1]
    setup.engine.step([gone[1], neighbour[1]], [5, 6])
    setup.engine.end(neighbour[1])
    assert finished_of(await neighbour[0].rest()).usage.completion_tokens == 2
    assert (await setup.info()).load.num_streams == 0


async def test_call_whose_deadline_passes_is_aborted(setup: Setup) -> None:
    """E05: it was not cancelled, and it has to end all the same."""
    call = setup.serve(timeout_s=2)
    async with asyncio.timeout(TIMEOUT_S):
        add = await setup.engine.added.get()
    assert (await call.error())[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await setup.aborted() == add.id


async def test_call_after_a_cancelled_one_is_served_at_once(setup: Setup) -> None:
    """E03, A26: under the same id."""
    gone, _ = await setup.begin()
    gone.call.cancel()
    call, request_id = await setup.begin()
    setup.engine.step([request_id], setup.ids("x"))
    setup.engine.end(request_id)
    assert text_of(await call.rest()) == "x"
    await setup.aborted()


async def test_detokenizer_is_not_ready_while_its_engine_is_stalled(setup: Setup) -> None:
    """G02."""
    setup.engine.step(load=replica_pb2.ReplicaLoad(num_running=1, stalled=True))
    await setup.health_becomes(NOT_SERVING)
    info = await setup.info()
    assert (info.state, info.load.stalled) == (replica_pb2.REPLICA_STATE_READY, True)
    setup.engine.step(load=replica_pb2.ReplicaLoad())
    await setup.health_becomes(SERVING)
    assert not (await setup.info()).load.stalled


async def test_request_carries_the_stamp_of_its_arrival(setup: Setup) -> None:
    before = time.monotonic_ns()
    call, request_id = await setup.begin()
    assert before <= call.add.arrived_ns <= time.monotonic_ns()
    call.call.cancel()
    assert await setup.aborted() == request_id


async def test_call_cancelled_while_its_reader_is_stalled_is_aborted(setup: Setup) -> None:
    """E01: a call that ends during a write is cleaned up as one that ends while it waits."""
    call, request_id = await setup.begin()
    ids = setup.ids(" word" * 20_000)
    for number in (1, 2):
        setup.engine.step([request_id], ids, num_tokens=[len(ids)], load=replica_pb2.ReplicaLoad(num_running=number))
    while (await setup.info()).load.num_running != 2:
        pass
    call.call.cancel()
    assert await setup.aborted() == request_id
    assert (await setup.info()).load.num_streams == 0


async def test_call_over_the_bound_is_told_to_come_back(setup: Setup) -> None:
    """A27."""
    taken = [await setup.begin() for _ in range(MAX_STREAMS)]
    assert (await setup.info()).load.num_streams == MAX_STREAMS
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await setup.serve().rest()
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details_of(refusal.value) == ("RESOURCE_EXHAUSTED", 1.0)
    for call, request_id in taken:
        setup.engine.end(request_id)
        await call.rest()
    call, request_id = await setup.begin()
    setup.engine.end(request_id)
    await call.rest()


async def test_load_is_the_engines_of_its_last_step(setup: Setup) -> None:
    call, request_id = await setup.begin()
    setup.engine.step([request_id], setup.ids("x"), load=replica_pb2.ReplicaLoad(num_running=3, num_used_blocks=8))
    while not (await call.next()).HasField("delta"):
        pass
    load = (await setup.info()).load
    assert (load.num_running, load.num_used_blocks, load.num_streams) == (3, 8, 1)
    setup.engine.end(request_id)
    await call.rest()


async def test_lost_engine_ends_open_calls_and_one_that_has_said_hello_serves(setup: Setup) -> None:
    calls = [await setup.begin() for _ in range(2)]
    setup.engine.says_hello.clear()
    setup.engine.connected.clear()
    setup.engine.hang_up()
    for call, _ in calls:
        assert (await call.error())[0] is grpc.StatusCode.UNAVAILABLE
    await setup.health_becomes(NOT_SERVING)
    async with asyncio.timeout(TIMEOUT_S):
        await setup.engine.connected.wait()
    info = await setup.info()
    assert (info.state, info.HasField("engine")) == (replica_pb2.REPLICA_STATE_STARTING, False)
    assert (await setup.serve().error())[0] is grpc.StatusCode.UNAVAILABLE
    setup.engine.says_hello.set()
    await setup.health_becomes(SERVING)
    info = await setup.info()
    assert (info.state, info.engine) == (replica_pb2.REPLICA_STATE_READY, INFO)
    call, request_id = await setup.begin()
    assert request_id not in {number for _, number in calls}
    setup.engine.end(request_id)
    await call.rest()


async def test_draining_detokenizer_says_so_and_still_serves_late_calls(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    engine.says_hello.set()
    async with detokenizing(engine, tmp_path, drain_delay_s=600) as setup:
        await setup.health_becomes(SERVING)
        setup.process.terminate()
        await setup.health_becomes(NOT_SERVING)
        assert (await setup.info()).state == replica_pb2.REPLICA_STATE_DRAINING
        call, request_id = await setup.begin()
        engine.end(request_id)
        assert finished_of(await call.rest())
        setup.process.kill()


async def test_drained_detokenizer_refuses_new_calls_and_lets_open_ones_finish(tmp_path: Path) -> None:
    """E13."""
    engine = ScriptedEngine()
    engine.says_hello.set()
    async with detokenizing(engine, tmp_path) as setup:
        await setup.health_becomes(SERVING)
        call, request_id = await setup.begin()
        setup.process.terminate()
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await serve_until_refused(setup)
        # The second is what gRPC tells a call that comes in the very moment.
        assert refusal.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        engine.step([request_id], setup.ids(" done"))
        engine.end(request_id)
        assert text_of(await call.rest()) == " done"
        assert await setup.process.wait() == 0


async def serve_until_refused(setup: Setup) -> None:
    while True:
        call, request_id = await setup.begin()
        setup.engine.end(request_id)
        assert finished_of(await call.rest())
