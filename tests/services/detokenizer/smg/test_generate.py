"""Generate and Abort, before an engine that does what the test says."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2

from kvern.v1 import engine_pb2, inference_pb2
from tests.services.detokenizer.driver import logprobs_at
from tests.services.detokenizer.scripted_engine import EOS, MAX_MODEL_LEN, VOCAB_SIZE
from tests.services.detokenizer.setup import TIMEOUT_S
from tests.services.scraping import scrape, scrape_until

from .door import SALT, Door

pytestmark = pytest.mark.asyncio(loop_scope="package")

LENGTH = inference_pb2.FINISH_REASON_LENGTH
STOP = inference_pb2.FINISH_REASON_STOP


async def finish(door: Door, call: Any) -> list[Any]:
    door.engine.end(call.add.id)
    return await call.rest()


async def test_zeros_that_mean_defaults_reach_the_engine_as_defaults(door: Door) -> None:
    call = await door.begin()
    sampling = call.add.sampling
    assert not any(map(sampling.HasField, ("temperature", "top_p", "repetition_penalty")))
    assert (sampling.n, sampling.top_k, sampling.min_p, sampling.HasField("seed")) == (1, 0, 0, True)
    assert (call.add.stopping.max_tokens, call.add.cache.salt) == (MAX_MODEL_LEN - 3, SALT)
    assert (call.add.HasField("logprobs"), call.add.HasField("constraint")) == (False, False)
    await finish(door, call)


async def test_request_reaches_the_engine_as_asked(door: Door) -> None:
    call = await door.begin(
        temperature=0, top_p=0.5, top_k=7, min_p=0.25, frequency_penalty=1, presence_penalty=-1, repetition_penalty=1.5,
        max_tokens=9, min_tokens=2, stop=["never"], stop_token_ids=[11], ignore_eos=True, seed=-1, logprobs=3,
        logit_bias={4: -2.0}, regex="a+", spaces_between_special_tokens=True, grammar_from_first_token=True,
    )  # fmt: skip
    add = call.add
    assert (add.sampling.HasField("temperature"), add.sampling.temperature, add.sampling.top_p) == (True, 0, 0.5)
    assert (add.sampling.top_k, add.sampling.min_p, add.sampling.repetition_penalty) == (7, 0.25, 1.5)
    assert (add.sampling.frequency_penalty, add.sampling.presence_penalty) == (1, -1)
    assert (add.sampling.seed, dict(add.sampling.logit_bias)) == (2**64 - 1, {4: -2.0})
    assert (add.stopping.max_tokens, add.stopping.min_tokens, add.stopping.ignore_eos) == (9, 2, True)
    assert (list(add.stopping.stop_token_ids), list(add.stopping.stop)) == ([11], [])
    assert (add.logprobs, add.constraint.regex) == (3, "a+")
    await finish(door, call)


@pytest.mark.parametrize(
    ("field", "value"),
    [("json_schema", '{"type": "object"}'), ("grammar", "root"), ("structural_tag", "{}"), ("json_object", True)],
)
async def test_constraint_keeps_its_kind(door: Door, field: str, value: Any) -> None:
    call = await door.begin(**{field: value})
    assert getattr(call.add.constraint, field) == value
    await finish(door, call)


async def test_choices_are_a_constraint_too(door: Door) -> None:
    call = await door.begin(choice=vllm_engine_pb2.ChoiceConstraint(choices=["yes", "no"]))
    assert list(call.add.constraint.choices.values) == ["yes", "no"]
    await finish(door, call)


async def test_stream_tells_tokens_as_they_come_and_all_of_them_at_the_end(door: Door) -> None:
    call = await door.begin()
    door.engine.step(scheduled=[engine_pb2.FirstScheduled(id=call.add.id, cached_tokens=2)])
    ids = door.setup.ids("é日本 ok")
    for token_id in ids:
        door.engine.step([call.add.id], [token_id])
        chunk = await call.chunk()
        assert (list(chunk.token_ids), chunk.completion_tokens, chunk.index) == ([token_id], 1, 0)
        assert (chunk.prompt_tokens, chunk.cached_tokens) == (3, 2)
    [complete] = await finish(door, call)
    assert (list(complete.output_ids), complete.finish_reason) == (ids, "length")
    assert (complete.prompt_tokens, complete.cached_tokens, complete.completion_tokens) == (3, 2, len(ids))
    assert complete.WhichOneof("matched_stop") is None


async def test_answer_that_is_not_streamed_is_one_message_a_choice(door: Door) -> None:
    call = await door.begin(stream=False, n=2, logprobs=1)
    answers = [door.setup.ids(" one two"), door.setup.ids(" three")]
    for index, ids in enumerate(answers):
        for place, token_id in enumerate(ids):
            door.engine.step([call.add.id], [token_id], choices=[index], logprobs=[logprobs_at(place)])
    door.engine.end(call.add.id, index=1)
    door.engine.end(call.add.id, index=0)
    completes = sorted(await call.rest(), key=lambda each: each.index)
    assert [list(each.output_ids) for each in completes] == answers
    for index, complete in enumerate(completes):
        told = complete.output_logprobs
        assert (complete.index, list(told.token_ids)) == (index, answers[index])
        assert list(told.token_logprobs) == [-place for place in range(len(answers[index]))]
        assert [list(top.token_ids) for top in told.top_logprobs] == [[place] for place in range(len(answers[index]))]


async def test_stop_string_ends_the_choice_and_is_named(door: Door) -> None:
    """A08: nothing is told of the tokens after it."""
    call = await door.begin(stop=["beta gamma"])
    ids = door.setup.ids("alpha beta gamma delta")
    door.engine.step([call.add.id] * len(ids), ids)
    *chunks, complete = await call.rest()
    until = len(door.setup.ids("alpha beta gamma"))
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == list(complete.output_ids) == ids[:until]
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "beta gamma")
    assert await door.setup.aborted() == call.add.id


async def test_matched_token_is_told_of_the_clients_own_stop_ids_only(door: Door) -> None:
    for stop_id, told in ((EOS, None), (11, "matched_token_id")):
        call = await door.begin(stop_token_ids=[11])
        door.engine.step([call.add.id], [stop_id])
        door.engine.end(call.add.id, STOP, stop_token_id=stop_id)
        *_, complete = await call.rest()
        assert (complete.finish_reason, complete.WhichOneof("matched_stop")) == ("stop", told)
        assert list(complete.output_ids) == [stop_id]


@pytest.mark.parametrize(
    ("reason", "told"),
    [(inference_pb2.FINISH_REASON_ABORT, "abort"), (inference_pb2.FINISH_REASON_ERROR, "error")],
)
async def test_end_of_another_kind_keeps_its_name(
    door: Door, reason: inference_pb2.FinishReason.ValueType, told: str
) -> None:
    call = await door.begin()
    door.engine.end(call.add.id, reason)
    [complete] = await call.rest()
    assert complete.finish_reason == told


@pytest.mark.parametrize("stream", [True, False])
async def test_prompt_log_probabilities_come_once_and_none_for_the_first_token(door: Door, stream: bool) -> None:
    call = await door.begin(prompt_logprobs=1, stream=stream)
    for start in (1, 2):
        told = engine_pb2.EnginePromptLogprobs(id=call.add.id, start=start, items=[logprobs_at(start)])
        door.engine.step(prompt_logprobs=[told])
    door.engine.step([call.add.id], [9])
    first, *rest = await finish(door, call)
    told = first.input_logprobs
    assert [item.value if item.HasField("value") else None for item in told.token_logprobs] == [None, -1, -2]
    assert list(told.token_ids) == [5, 6, 7]
    assert [list(top.token_ids) for top in told.top_logprobs] == [[], [1], [2]]
    assert not any(each.HasField("input_logprobs") for each in rest)


async def test_prompt_of_one_token_has_a_log_probability_of_none(door: Door) -> None:
    call = await door.begin(ids=[5], prompt_logprobs=1)
    [complete] = await finish(door, call)
    told = complete.input_logprobs
    assert ([item.HasField("value") for item in told.token_logprobs], list(told.token_ids)) == ([False], [5])
    assert len(told.top_logprobs) == 1


async def test_text_is_encoded_as_the_model_would_have_it(door: Door) -> None:
    call = await door.begin(text="Once upon a time")
    assert list(call.add.prompt_token_ids) == door.setup.tokenizer.encode("Once upon a time", add_special_tokens=True)
    await finish(door, call)


@pytest.mark.parametrize(("kept", "left"), [(2, [98, 99]), (-1, list(range(46, 100)))])
async def test_prompt_is_cut_to_its_last_tokens(door: Door, kept: int, left: list[int]) -> None:
    """-1: to what the model takes, with room for the answer."""
    call = await door.begin(ids=list(range(100)), max_tokens=10, truncate_prompt_tokens=kept)
    assert list(call.add.prompt_token_ids) == left
    await finish(door, call)


@pytest.mark.parametrize(
    ("fields", "code", "named"),
    [
        ({"ids": [9] * 100, "truncate_prompt_tokens": 99}, grpc.StatusCode.INVALID_ARGUMENT, "prompt: 99 tokens"),
        ({"ids": []}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids.ids"),
        ({"ids": [VOCAB_SIZE]}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids.ids[0]"),
        ({"ids": [1, 2**32 - 1]}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids.ids[1]"),
        ({"text": ""}, grpc.StatusCode.INVALID_ARGUMENT, "text"),
        ({"text": "x" * (2**20 + 1)}, grpc.StatusCode.INVALID_ARGUMENT, "text: must be at most 1048576 bytes"),
        ({"stop": [""]}, grpc.StatusCode.INVALID_ARGUMENT, "stopping.stop[0]"),
        ({"top_p": 2.0}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p"),
        ({"max_tokens": 100}, grpc.StatusCode.INVALID_ARGUMENT, "stopping.max_tokens"),
        ({"logprobs": -1}, grpc.StatusCode.INVALID_ARGUMENT, "sampling_params.logprobs"),
        ({"prompt_logprobs": -1}, grpc.StatusCode.INVALID_ARGUMENT, "sampling_params.prompt_logprobs"),
        ({"logprobs": 65}, grpc.StatusCode.INVALID_ARGUMENT, "output.logprobs"),
        ({"logit_bias": {-1: 1.0}}, grpc.StatusCode.INVALID_ARGUMENT, "sampling_params.logit_bias"),
        ({"truncate_prompt_tokens": 0}, grpc.StatusCode.INVALID_ARGUMENT, "sampling_params.truncate_prompt_tokens"),
        ({"json_object": False}, grpc.StatusCode.INVALID_ARGUMENT, "constraint.json_object"),
        ({"n": 129}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.n"),
        ({"request_id": "x" * 257}, grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
        ({"data_parallel_rank": 1}, grpc.StatusCode.INVALID_ARGUMENT, "data_parallel_rank"),
        ({"kv_transfer_params_json": "{}"}, grpc.StatusCode.UNIMPLEMENTED, "kv_transfer_params_json"),
        ({"mm_inputs": vllm_engine_pb2.MultimodalInputs()}, grpc.StatusCode.UNIMPLEMENTED, "mm_inputs"),
    ],
)
async def test_wrong_request_is_refused_by_name(
    door: Door, fields: dict[str, Any], code: grpc.StatusCode, named: str
) -> None:
    """A14, B09; nobody else notices."""
    other = await door.begin(request_id="other")
    told, message = await door.generate(**fields).error()
    assert told is code
    assert message.startswith(named)
    [complete] = await finish(door, other)
    assert complete.finish_reason == "length"


async def test_request_without_a_prompt_is_refused(door: Door) -> None:
    call = door.stub.Generate(vllm_engine_pb2.GenerateRequest(request_id="r"), timeout=TIMEOUT_S)
    with pytest.raises(grpc.aio.AioRpcError, match="prompt: missing"):
        await call.read()


async def test_abort_ends_the_stream_at_once_and_the_id_is_free(door: Door) -> None:
    """A26, H02: SMG leaves the call of a client that is gone open, and reads no more of it."""
    before = await scrape(door.setup.status)
    for _ in range(2):
        call = await door.begin()
        door.engine.step([call.add.id], [9])
        await call.chunk()
        await door.abort("unknown", "r", "r")
        assert await door.setup.aborted() == call.add.id
        assert (await call.error())[0] is grpc.StatusCode.CANCELLED
    calls = {"method": "vllm.grpc.engine.VllmEngine/Generate", "code": "CANCELLED"}
    num_calls = before("kvern_rpc_requests_total", **calls) + 2
    after = await scrape_until(door.setup.status, lambda now: now("kvern_rpc_requests_total", **calls) >= num_calls)
    name = "kvern_detokenizer_choices_total"
    assert after(name, reason="abort") == before(name, reason="abort") + 2
    assert (await door.setup.info()).load.num_streams == 0


async def test_abort_ends_a_call_whose_reader_has_stopped(door: Door) -> None:
    call = await door.begin()
    for _ in range(200):
        door.engine.step([call.add.id] * 1000, [9] * 1000)
    await door.abort("r")
    assert await door.setup.aborted() == call.add.id
    async with asyncio.timeout(TIMEOUT_S):
        while (await door.setup.info()).load.num_streams:
            pass


async def test_call_that_is_cancelled_aborts_its_request(door: Door) -> None:
    call = await door.begin()
    call.call.cancel()
    assert await door.setup.aborted() == call.add.id


async def test_id_in_flight_is_refused(door: Door) -> None:
    """C27."""
    call = await door.begin()
    assert await door.generate().error() == (grpc.StatusCode.ALREADY_EXISTS, "request_id 'r' is in flight")
    await finish(door, call)


async def test_calls_without_an_id_do_not_meet(door: Door) -> None:
    calls = [await door.begin(request_id="") for _ in range(2)]
    for call in calls:
        [complete] = await finish(door, call)
        assert complete.finish_reason == "length"


async def test_place_is_shared_with_routers(door: Door) -> None:
    calls = [await door.begin(request_id=str(number)) for number in range(4)]
    assert (await door.generate().error())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await door.setup.serve().error())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in calls:
        await finish(door, call)


async def test_lost_engine_ends_the_call_and_the_replica_is_not_healthy_until_it_is_back(door: Door) -> None:
    assert await door.health() == (True, "ready")
    call = await door.begin()
    door.engine.says_hello.clear()
    door.engine.hang_up()
    assert (await call.error())[0] is grpc.StatusCode.UNAVAILABLE
    assert await door.health() == (False, "starting")
    assert (await door.generate().error())[0] is grpc.StatusCode.UNAVAILABLE


async def test_each_call_is_a_line_in_the_log_with_how_it_ended(door: Door) -> None:
    call = await door.begin(request_id="logged")
    door.engine.step([call.add.id], door.setup.ids("Hi")[:1])
    await call.chunk()
    await door.abort("logged")
    assert (await call.error())[0] is grpc.StatusCode.CANCELLED
    line = await door.setup.logged(event="request ended", request_id="logged")
    assert (line["door"], line["status"], line["prompt_tokens"], line["completion_tokens"]) == (
        "smg",
        "CANCELLED",
        3,
        1,
    )
