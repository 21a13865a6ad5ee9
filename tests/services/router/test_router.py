"""The router's own rules, on a router process whose tokenizer and replicas do what the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TypeVar

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from kvern.services.router.breaker import MAX_FAILURES
from kvern.services.router.choice import DECODE_WEIGHT, QUEUE_WEIGHT
from kvern.v1 import inference_pb2, replica_pb2

from . import scripted
from .scripted import CONTEXT, MODEL
from .setup import MAX_STREAMS, NOT_SERVING, SERVING, Call, Setup, is_ready

pytestmark = pytest.mark.asyncio(loop_scope="module")

_Detail = TypeVar("_Detail", bound=Message)


async def texts(call: Call) -> list[str]:
    return [response.delta.text async for response in call if response.HasField("delta")]


async def failure(call: Call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await texts(call)
    return failed.value


def detail(error: grpc.aio.AioRpcError, kind: type[_Detail]) -> _Detail:
    """Return one google.rpc detail of a status."""
    trailing = dict(error.trailing_metadata())
    packed: list[AnyMessage] = list(status_pb2.Status.FromString(trailing["grpc-status-details-bin"]).details)
    found = kind()
    assert any(each.Unpack(found) for each in packed)
    return found


async def test_generate_frames_reach_client_byte_for_byte(setup: Setup) -> None:
    unknown_to_router = b"\xfa\x7f\x03new"  # field 2047, as a newer replica might send
    frames = [b"", unknown_to_router, inference_pb2.GenerateResponse().SerializeToString()]

    async def answer(request: inference_pb2.GenerateRequest) -> AsyncIterator[replica_pb2.ServeResponse]:
        for frame in frames:
            yield replica_pb2.ServeResponse(client_frame=frame)

    setup.behave(answer)
    received = [response.SerializeToString() async for response in setup.generate()]
    assert received == frames


async def test_generate_replica_gets_completed_request(setup: Setup) -> None:
    call = setup.generate("Hi", timeout=60, sampling=inference_pb2.Sampling(temperature=0.5), session_id="s")
    assert await texts(call) == ["Hello"]
    [request] = setup.received()
    replica = setup.chosen
    assert request.request_id
    assert request.model == MODEL
    assert request.WhichOneof("prompt") == "token_ids"
    assert list(request.token_ids.ids) == list(b"Hi")
    assert request.sampling.HasField("seed")
    assert request.sampling.temperature == 0.5
    assert request.session_id == "s"
    assert replica.time_remaining is not None
    assert 50 < replica.time_remaining < 61  # gRPC rounds deadlines to tenths of a second


async def test_generate_without_seed_draws_new_one_each_time(setup: Setup) -> None:
    for _ in range(4):
        await texts(setup.generate())
    assert len({request.sampling.seed for request in setup.received()}) == 4


async def test_generate_with_id_and_seed_keeps_them(setup: Setup) -> None:
    await texts(setup.generate(request_id="mine", model=MODEL, sampling=inference_pb2.Sampling(seed=0)))
    [request] = setup.received()
    assert (request.request_id, request.sampling.HasField("seed"), request.sampling.seed) == ("mine", True, 0)


async def test_generate_trailing_metadata_explains_choice_in_less_than_a_kibibyte(setup: Setup) -> None:
    call = setup.generate()
    await texts(call)
    told = {key: value for key, value in await call.trailing_metadata() if key.startswith("kvern-")}
    assert sum(len(key) + len(value) for key, value in told.items()) < 1024
    assert 0 <= float(told.pop("kvern-load-age-s")) < 60
    assert told == {
        "kvern-replica": setup.chosen.address,
        "kvern-policy": "prefix",
        "kvern-matched-tokens": "0",
        "kvern-cost": "uncached=2 queued=0 decode=0",
    }


async def test_generate_goes_where_fewest_requests_are(setup: Setup) -> None:
    first, second, third, fourth = setup.replicas
    first.load.num_running, second.load.num_waiting = 1, 1
    await setup.poll()
    await setup.statuses(lambda all_: all_[0].load.num_running == 1 and all_[1].load.num_waiting == 1)
    third.behaviour = fourth.behaviour = scripted.stall_after_start
    calls = [setup.generate() for _ in range(2)]
    for call in calls:
        assert (await call.read()).HasField("started")
    assert [len(replica.received) for replica in setup.replicas] == [0, 0, 1, 1]
    for call in calls:
        call.cancel()


async def test_generate_replica_unavailable_before_first_frame_tries_another(setup: Setup) -> None:
    """The replica that is asked first is unavailable, whichever it is."""

    async def behaviour(request: inference_pb2.GenerateRequest) -> AsyncIterator[replica_pb2.ServeResponse]:
        act = scripted.be_unavailable if len(setup.received()) == 1 else scripted.answer
        async for response in act(request):
            yield response

    setup.behave(behaviour)
    call = setup.generate()
    assert await texts(call) == ["Hello"]
    assert sorted(len(replica.received) for replica in setup.replicas) == [0, 0, 1, 1]
    first, second = setup.received()
    assert first == second
    [answered] = [replica for replica in setup.replicas if replica.num_sent]
    assert dict(await call.trailing_metadata())["kvern-replica"] == answered.address


async def test_generate_all_replicas_unavailable_tries_three_once_each(setup: Setup) -> None:
    setup.behave(scripted.be_unavailable)
    error = await failure(setup.generate())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert sorted(len(replica.received) for replica in setup.replicas) == [0, 1, 1, 1]


async def test_generate_replica_tried_is_not_tried_again(setup: Setup) -> None:
    """Not even when it looks well again and is the cheapest."""
    cheapest, *others = setup.replicas
    for replica in others:
        replica.load.num_running = 1
    await setup.poll()
    await setup.statuses(lambda all_: [each.load.num_running for each in all_] == [0, 1, 1, 1])

    async def fail_when_all_look_well(
        request: inference_pb2.GenerateRequest,
    ) -> AsyncIterator[replica_pb2.ServeResponse]:
        await setup.statuses(lambda all_: all(is_ready(each) for each in all_))
        async for response in scripted.be_unavailable(request):
            yield response

    cheapest.behaviour = scripted.be_unavailable
    for replica in others:
        replica.behaviour = fail_when_all_look_well
    error = await failure(setup.generate())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert (len(cheapest.received), len(setup.received())) == (1, 3)


async def test_generate_replica_that_failed_leaves_choice_until_it_answers(setup: Setup) -> None:
    """F19."""
    gone, *others = setup.replicas
    for replica in others:
        replica.load.num_running = 1
    await setup.poll()
    await setup.statuses(lambda all_: [each.load.num_running for each in all_] == [0, 1, 1, 1])

    async def vanish(request: inference_pb2.GenerateRequest) -> AsyncIterator[replica_pb2.ServeResponse]:
        gone.answers_polls = False
        async for response in scripted.be_unavailable(request):
            yield response

    gone.behaviour = vanish
    for _ in range(5):
        assert await texts(setup.generate()) == ["Hello"]
    assert len(gone.received) == 1
    gone.behaviour, gone.answers_polls = scripted.answer, True
    await setup.statuses(lambda all_: all(is_ready(each) for each in all_))
    await texts(setup.generate())
    assert len(gone.received) == 2


async def test_generate_client_cancels_before_first_frame_ends_call_at_replica(setup: Setup) -> None:
    setup.behave(scripted.stall)
    call = setup.generate()
    await setup.arrived(1)
    call.cancel()
    await asyncio.wait_for(setup.chosen.ended.wait(), 10)


@pytest.mark.parametrize("behaviour", [scripted.stall_after_start, scripted.flood])
async def test_generate_client_cancels_mid_stream_ends_call_at_replica(
    setup: Setup, behaviour: scripted.Behaviour
) -> None:
    """E01, and a reader that has stopped reading."""
    setup.behave(behaviour)
    call = setup.generate()
    assert (await call.read()).HasField("started")
    assert not setup.chosen.ended.is_set()
    call.cancel()
    await asyncio.wait_for(setup.chosen.ended.wait(), 10)


async def test_generate_deadline_passes_ends_call_at_replica(setup: Setup) -> None:
    setup.behave(scripted.stall_after_start)
    error = await failure(setup.generate(timeout=2.5))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(setup.chosen.ended.wait(), 10)


async def test_generate_request_id_in_flight_is_refused(setup: Setup) -> None:
    """C27."""
    setup.behave(scripted.stall_after_start)
    first = setup.generate(request_id="twin")
    await first.read()
    error = await failure(setup.generate(request_id="twin"))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "twin" in (error.details() or "")
    first.cancel()


async def test_generate_request_id_again_after_end_is_served(setup: Setup) -> None:
    """A26."""
    for _ in range(3):
        assert await texts(setup.generate(request_id="again")) == ["Hello"]


async def test_generate_beyond_max_streams_is_refused_with_retry_delay(setup: Setup) -> None:
    """A27."""
    setup.behave(scripted.stall_after_start)
    calls = [setup.generate() for _ in range(MAX_STREAMS)]
    for call in calls:
        await call.read()
    error = await failure(setup.generate())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.seconds == 1
    for call in calls:
        call.cancel()


async def test_generate_value_out_of_range_names_field(setup: Setup) -> None:
    error = await failure(setup.generate(sampling=inference_pb2.Sampling(temperature=-1)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "sampling.temperature"
    assert setup.received() == []


async def test_generate_field_not_implemented_is_refused(setup: Setup) -> None:
    error = await failure(setup.generate(adapter="lora"))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "adapter"


async def test_generate_unknown_model_names_those_served(setup: Setup) -> None:
    error = await failure(setup.generate(model="huge"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert MODEL in (error.details() or "")


async def test_generate_tokenizer_away_once_is_retried(setup: Setup) -> None:
    setup.tokenizer.failures = 1
    assert await texts(setup.generate()) == ["Hello"]


async def test_generate_tokenizer_away_twice_ends_unavailable(setup: Setup) -> None:
    setup.tokenizer.failures = 2
    error = await failure(setup.generate())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details() == "the tokenizer is away"


async def test_generate_tokenizer_that_hangs_leaves_half_of_the_deadline(setup: Setup) -> None:
    setup.tokenizer.hangs = True
    error = await failure(setup.generate(timeout=2.5))
    setup.tokenizer.hangs = False
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details() == "the tokenizer took more than its share of the deadline"


async def test_generate_replica_whose_calls_fail_is_left_out_though_it_says_it_is_well(setup: Setup) -> None:
    bad, *others = setup.replicas
    bad.behaviour = scripted.fail
    for replica in others:
        replica.load.num_running = 1
    await setup.poll()
    await setup.statuses(lambda all_: [each.load.num_running for each in all_] == [0, 1, 1, 1])
    for _ in range(MAX_FAILURES):
        assert (await failure(setup.generate())).code() is grpc.StatusCode.INTERNAL
    bad.received.clear()
    answers = []
    for _ in range(2):
        with suppress(grpc.aio.AioRpcError):  # a call that comes late is let through, to see whether it goes well again
            answers.append(await texts(setup.generate()))
    assert answers
    assert answers == [["Hello"]] * (2 - len(bad.received))


async def test_replica_not_ready_leaves_choice_until_it_is(setup: Setup) -> None:
    """F22."""
    for state in (replica_pb2.REPLICA_STATE_STARTING, replica_pb2.REPLICA_STATE_DRAINING):
        for replica in setup.replicas:
            replica.state = state
        await setup.health_becomes(NOT_SERVING)
        error = await failure(setup.generate(timeout=2.5))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert MODEL in (error.details() or "")
    await setup.use(setup.replicas[2])
    await setup.health_becomes(SERVING)
    await texts(setup.generate())
    assert len(setup.replicas[2].received) == 1


async def test_generate_waits_for_a_replica_that_is_starting(setup: Setup) -> None:
    """F22."""
    for replica in setup.replicas:
        replica.state = replica_pb2.REPLICA_STATE_STARTING
    await setup.health_becomes(NOT_SERVING)
    waiting = asyncio.ensure_future(texts(setup.generate()))
    await setup.use(setup.replicas[1])
    assert await waiting == ["Hello"]


async def test_health_tokenizer_not_serving_is_not_ready(setup: Setup) -> None:
    await setup.tokenizer.set_serving(False)
    await setup.health_becomes(NOT_SERVING)
    await setup.tokenizer.set_serving(True)
    await setup.health_becomes(SERVING)


async def test_tokenize_text_and_chat_give_ids_and_context(setup: Setup) -> None:
    text = await setup.inference.Tokenize(inference_pb2.TokenizeRequest(text="abc"))
    assert (list(text.ids), text.max_context) == (list(b"abc"), CONTEXT)
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="abc")])
    assert (await setup.inference.Tokenize(inference_pb2.TokenizeRequest(chat=chat))).ids == text.ids


async def test_tokenize_without_prompt_is_refused(setup: Setup) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await setup.inference.Tokenize(inference_pb2.TokenizeRequest())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_detokenize_ids_gives_text(setup: Setup) -> None:
    decoded = await setup.inference.Detokenize(inference_pb2.DetokenizeRequest(model=MODEL, ids=b"abc"))
    assert decoded.text == "abc"


async def test_list_models_counts_ready_replicas(setup: Setup) -> None:
    await setup.use(*setup.replicas[:3])
    [model] = (await setup.inference.ListModels(inference_pb2.ListModelsRequest())).models
    assert model == inference_pb2.Model(
        name=MODEL, max_context=CONTEXT, vocab_size=256, block_size=16, contract="c", ready_replicas=3
    )


async def test_route_names_cheapest_and_generates_nothing(setup: Setup) -> None:
    setup.behave(scripted.stall_after_start)
    calls = [setup.generate() for _ in range(3)]
    for call in calls:
        await call.read()
    [idle] = [replica for replica in setup.replicas if not replica.received]
    request = inference_pb2.GenerateRequest(text="abc")
    route = await setup.inference.Route(inference_pb2.RouteRequest(request=request))
    assert route.address == idle.address
    assert (route.prompt_tokens, list(route.prompt_token_ids), route.matched_tokens) == (3, list(b"abc"), 0)
    # Three tokens each; at the others also a request of two, not computed yet.
    assert [candidate.cost for candidate in route.candidates] == [3, *[3 + 2 * QUEUE_WEIGHT + DECODE_WEIGHT] * 3]
    assert idle.received == []
    for call in calls:
        call.cancel()


async def test_route_counts_what_replicas_report_but_own_requests_once(setup: Setup) -> None:
    setup.behave(scripted.stall)
    call = setup.generate("five!")
    await setup.arrived(1)
    setup.chosen.load = replica_pb2.ReplicaLoad(num_running=2, num_waiting=1, queued_prefill_tokens=5 + 100)
    await setup.poll()
    await setup.statuses(lambda all_: max(each.load.num_running for each in all_) == 2)
    request = inference_pb2.GenerateRequest(text="abc")
    route = await setup.inference.Route(inference_pb2.RouteRequest(request=request))
    assert [candidate.cost for candidate in route.candidates] == [3, 3, 3, 3 + 105 * QUEUE_WEIGHT + 3 * DECODE_WEIGHT]
    call.cancel()


async def test_request_log_has_one_line_without_content(setup: Setup) -> None:
    async def behaviour(request: inference_pb2.GenerateRequest) -> AsyncIterator[replica_pb2.ServeResponse]:
        yield scripted.started(request)
        yield scripted.scheduled(cached_tokens=5)

    setup.behave(behaviour)
    await texts(setup.generate("a secret", request_id="logged"))
    log = setup.log.read_text()
    [line] = [json.loads(line) for line in log.splitlines() if '"logged"' in line]
    assert (line["model"], line["prompt_tokens"], line["status"]) == (MODEL, 8, "OK")
    assert line["replica"] == setup.chosen.address
    assert (line["matched_tokens"], line["cached_tokens"]) == (0, 5)
    assert line["duration_s"] >= 0
    assert "secret" not in log
