"""What goes with the text where it was asked for: log-probabilities, and the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvern.v1 import engine_pb2, inference_pb2
from kvern.v1.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Output, Stopping

from .scripted_engine import EOS
from .setup import Setup, finished_of, text_of

pytestmark = pytest.mark.asyncio(loop_scope="package")


def told(entry: int, *top_ids: int) -> engine_pb2.EngineTokenLogprobs:
    """Log-probabilities of one token: minus its place, its alternatives -1, -2 and so on."""
    top = [-float(place) for place in range(1, len(top_ids) + 1)]
    return engine_pb2.EngineTokenLogprobs(entry=entry, logprob=-entry, rank=1, top_ids=top_ids, top_logprobs=top)


def items_of(events: Sequence[inference_pb2.GenerateResponse]) -> list[inference_pb2.TokenLogprobs]:
    return [item for event in events for item in event.delta.logprobs]


def step(setup: Setup, request_id: int, ids: Sequence[int], **fields: Any) -> None:
    """Send tokens, each with the first byte of an emoji as its one alternative."""
    [other, *_] = setup.ids("😀")
    logprobs = [told(entry, other) for entry in range(len(ids))]
    setup.engine.step([request_id] * len(ids), ids, logprobs=logprobs, **fields)


@pytest.mark.parametrize("text", ["“quoted”, she said", "ok 😀 日本"])
async def test_each_token_and_alternative_has_its_own_bytes(setup: Setup, text: str) -> None:
    """A19, A20."""
    call, request_id = await setup.begin(output=Output(logprobs=1))
    assert call.add.logprobs == 1
    ids = setup.ids(text)
    for token_id in ids:
        step(setup, request_id, [token_id])
    setup.engine.end(request_id)
    events = await call.rest()
    items = items_of(events)
    assert b"".join(item.sampled.token for item in items).decode() == text_of(events) == text
    assert [item.sampled.token_id for item in items] == ids
    [first_byte, *_] = setup.ids("😀")
    for item in items:
        [alternative] = item.top
        assert (alternative.token_id, alternative.logprob, alternative.rank) == (first_byte, -1.0, 1)
        assert alternative.token == "😀".encode()[: len(alternative.token)] != b""


async def test_delta_tells_of_tokens_whose_text_is_held_back(setup: Setup) -> None:
    """And of each exactly once, in merged steps too."""
    call, request_id = await setup.begin(
        output=Output(logprobs=0, token_ids=True), stopping=Stopping(stop=["two three"])
    )
    ids = setup.ids(" one two")
    step(setup, request_id, ids)
    delta = (await call.next()).delta
    assert (delta.text, list(delta.token_ids)) == (" one ", ids)
    assert [(item.sampled.token, item.sampled.logprob) for item in delta.logprobs] == [(b" one", 0.0), (b" two", -1.0)]
    step(setup, request_id, setup.ids(" three"))
    step(setup, request_id, setup.ids(" four"))
    events = await call.rest()
    assert text_of(events) == ""
    assert [item.sampled.token for item in items_of(events)] == [b" three"]
    assert finished_of(events).stop == "two three"
    assert await setup.aborted() == request_id


async def test_log_probabilities_end_with_the_token_that_completes_a_stop_string(setup: Setup) -> None:
    """Tokens after it do not count, though their step brought them."""
    call, request_id = await setup.begin(output=Output(logprobs=0), stopping=Stopping(stop=["two"]))
    step(setup, request_id, setup.ids(" one two three four"))
    events = await call.rest()
    assert text_of(events) == " one "
    assert [item.sampled.token for item in items_of(events)] == [b" one", b" two"]


async def test_end_token_that_is_not_shown_has_no_bytes(setup: Setup) -> None:
    call, request_id = await setup.begin(output=Output(logprobs=0))
    end = engine_pb2.ChoiceEnd(id=request_id, reason=FINISH_REASON_STOP, stop_token_id=EOS)
    step(setup, request_id, [*setup.ids("Hi"), EOS], ended=[end])
    events = await call.rest()
    assert [(item.sampled.token_id, item.sampled.token) for item in items_of(events)] == [
        (setup.ids("Hi")[0], b"Hi"),
        (EOS, b""),
    ]


async def test_log_probabilities_of_choices_and_requests_are_told_apart(setup: Setup) -> None:
    sampling = inference_pb2.Sampling(seed=9, n=2)
    asked, plain = await setup.begin(sampling=sampling, output=Output(logprobs=0)), await setup.begin()
    [a, b, c] = (setup.ids(text)[0] for text in (" one", " two", " three"))
    setup.engine.step([plain[1], asked[1], asked[1]], [c, a, b], choices=[0, 0, 1], logprobs=[told(1), told(2)])
    for request_id, index in ((asked[1], 0), (asked[1], 1), (plain[1], 0)):
        setup.engine.end(request_id, index=index)
    deltas = {event.delta.index: event.delta for event in await asked[0].rest() if event.HasField("delta")}
    assert [(deltas[index].text, deltas[index].logprobs[0].sampled.logprob) for index in range(2)] == [
        (" one", -1.0),
        (" two", -2.0),
    ]
    assert items_of(await plain[0].rest()) == []


async def test_prompts_log_probabilities_come_as_they_are_computed_before_any_delta(setup: Setup) -> None:
    prompt = setup.ids("“A” test")
    call, request_id = await setup.begin(prompt=prompt, output=Output(prompt_logprobs=1))
    assert (call.add.prompt_logprobs, call.add.HasField("logprobs")) == (1, False)
    for start in range(1, len(prompt), 2):
        items = [told(position, 5) for position in range(start, min(start + 2, len(prompt)))]
        piece = engine_pb2.EnginePromptLogprobs(id=request_id, start=start, items=items)
        setup.engine.step(prompt_logprobs=[piece])
    step(setup, request_id, setup.ids("x"))
    setup.engine.end(request_id)
    events = await call.rest()
    kinds = [event.WhichOneof("event") for event in events]
    assert sorted(kinds, key=["prompt_logprobs", "delta", "finished"].index) == kinds
    pieces = [event.prompt_logprobs for event in events if event.HasField("prompt_logprobs")]
    told_of = {piece.start + place: item for piece in pieces for place, item in enumerate(piece.items)}
    assert list(told_of) == list(range(1, len(prompt)))
    for position, item in told_of.items():
        assert (item.sampled.token_id, item.sampled.logprob) == (prompt[position], -position)
        assert [each.token_id for each in item.top] == [5]
    tail = b"".join(item.sampled.token for item in told_of.values())
    assert "“A” test".encode().endswith(tail)


async def test_prompts_log_probabilities_are_not_told_again_after_the_first_token(setup: Setup) -> None:
    for ids, again in ((setup.ids("a"), False), ([], True)):
        progress = inference_pb2.ChoiceProgress(token_ids=ids)
        resume = inference_pb2.Resume(seed=9, choices=[progress])
        call, request_id = await setup.begin(output=Output(prompt_logprobs=0), resume=resume)
        assert call.add.HasField("prompt_logprobs") is again
        assert [(each.index, list(each.token_ids)) for each in call.add.resumed] == [(0, ids)]
        setup.engine.end(request_id)
        await call.rest()


async def test_echo_of_a_prompt_without_output_is_the_prompt(setup: Setup) -> None:
    """A22."""
    prompt = setup.ids("<|im_start|>user\nHello 日本")
    call, request_id = await setup.begin(prompt=prompt, output=Output(echo=True), stopping=Stopping(max_tokens=0))
    assert (call.add.stopping.HasField("max_tokens"), call.add.stopping.max_tokens) == (True, 0)
    setup.engine.end(request_id)
    events = await call.rest()
    assert text_of(events) == "user\nHello 日本"
    finished = finished_of(events)
    assert (finished.reason, finished.usage.completion_tokens) == (FINISH_REASON_LENGTH, 0)


async def test_first_delta_of_each_choice_begins_with_the_prompt_in_which_nothing_stops(setup: Setup) -> None:
    call, request_id = await setup.begin(
        prompt=setup.ids("<|im_start|>one two"),
        sampling=inference_pb2.Sampling(seed=9, n=2),
        output=Output(echo=True, skip_special_tokens=False, logprobs=0),
        stopping=Stopping(stop=["two", "wo three"]),
    )
    ids = [setup.ids(text)[0] for text in (" three", " four")]
    setup.engine.step([request_id] * 2, ids, choices=[0, 1], logprobs=[told(0), told(1)])
    deltas = [(await call.next()).delta for _ in range(2)]
    assert [delta.text for delta in deltas] == ["<|im_start|>one two three", "<|im_start|>one two four"]
    assert [[item.sampled.token for item in delta.logprobs] for delta in deltas] == [[b" three"], [b" four"]]
    step(setup, request_id, setup.ids(" five"))
    assert (await call.next()).delta.text == " five"
    for index in range(2):
        setup.engine.end(request_id, index=index)
    await call.rest()
    assert call.updates[-1].text_bytes_total == len("<|im_start|>one two four")


async def test_character_that_the_prompt_began_is_completed_by_the_output(setup: Setup) -> None:
    *begun, last = setup.ids("日")
    call, request_id = await setup.begin(prompt=[*setup.ids("a"), *begun], output=Output(echo=True))
    setup.engine.step([request_id], [last])
    setup.engine.end(request_id)
    assert text_of(await call.rest()) == "a日"
