"""The buffer between engine and writer."""

from __future__ import annotations

import asyncio

import pytest

from kvern.services.detokenizer.engine_request import MAX_BUFFERED_TOKENS, EngineRequest
from kvern.services.detokenizer.turns import Turns
from kvern.services.runtime.otlp import OtlpTracer
from kvern.services.runtime.slow_reader import ReaderWatch
from kvern.services.runtime.tracing import Kind, serve_in
from kvern.v1 import engine_pb2
from tests.collector import collecting, new_client_span


class Recorder:
    """What a request sends to the engine, in words."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def __call__(self, command: engine_pb2.ConnectRequest) -> None:
        self.sent.append(str(command.WhichOneof("command")))


@pytest.fixture
def commands() -> Recorder:
    return Recorder()


async def test_request_is_parked_once_while_its_writer_is_busy_and_goes_on_when_it_takes(commands: Recorder) -> None:
    """E18."""
    with ReaderWatch(60) as reader:
        request = EngineRequest(1, [0, 1], commands, reader, Turns(), lambda: None)
        for choice in (0, 1):
            request.add_tokens(choice, [5] * (MAX_BUFFERED_TOKENS // 2), (), 0.0)
        assert (commands.sent, request.is_parked) == ([], False)
        request.add_tokens(1, [6], (), 0.0)
        request.add_tokens(0, [6], (), 0.0)  # was under way
        assert (commands.sent, request.is_parked) == (["park"], True)
        news = await request.next_news()
        assert [len(news.choices[choice].token_ids) for choice in (0, 1)] == [MAX_BUFFERED_TOKENS // 2 + 1] * 2
        request.add_tokens(0, [7], (), 0.0)
        assert (commands.sent, request.is_parked) == (["park", "unpark"], False)


async def test_much_at_once_for_a_writer_that_waits_parks_nothing(commands: Recorder) -> None:
    with ReaderWatch(60) as reader:
        request = EngineRequest(1, [0], commands, reader, Turns(), lambda: None)
        writer = asyncio.create_task(request.next_news())
        await asyncio.sleep(0)
        request.add_tokens(0, [5] * 2 * MAX_BUFFERED_TOKENS, (), 0.0)
        assert len((await writer).choices[0].token_ids) == 2 * MAX_BUFFERED_TOKENS
    assert commands.sent == []


async def test_alternatives_and_the_prompts_log_probabilities_fill_the_buffer(commands: Recorder) -> None:
    item = engine_pb2.EngineTokenLogprobs(top_ids=range(63), top_logprobs=[0.0] * 63)
    items = [item] * (MAX_BUFFERED_TOKENS // 64)
    with ReaderWatch(60) as reader:
        request = EngineRequest(1, [0], commands, reader, Turns(), lambda: None)
        request.add_tokens(0, [5] * len(items), items, 0.0)
        assert not request.is_parked
        request.add_prompt_logprobs(engine_pb2.EnginePromptLogprobs(start=1, items=[item]))
        assert request.is_parked


async def test_choice_that_ended_after_it_was_aborted_is_counted_once(commands: Recorder) -> None:
    with ReaderWatch(60) as reader:
        request = EngineRequest(1, [0, 1], commands, reader, Turns(), lambda: None)
        request.abort_choice(0)
        request.end_choice(engine_pb2.ChoiceEnd(id=1, index=0), 0.0)
        assert request.is_running
        request.end_choice(engine_pb2.ChoiceEnd(id=1, index=1), 0.0)
        assert not request.is_running


async def test_parked_request_that_has_ended_is_not_asked_to_go_on(commands: Recorder) -> None:
    with ReaderWatch(60) as reader:
        request = EngineRequest(1, [0], commands, reader, Turns(), lambda: None)
        request.add_tokens(0, [5] * (MAX_BUFFERED_TOKENS + 1), (), 0.0)
        request.end_choice(engine_pb2.ChoiceEnd(id=1), 0.0)
        await request.next_news()
    assert commands.sent == ["park"]


async def test_parked_request_says_so_in_the_span_of_its_call(commands: Recorder) -> None:
    client = new_client_span()

    async def park(tracer: OtlpTracer) -> None:
        span = tracer.begin("Serve", Kind.SERVER, {"traceparent": client.traceparent})
        serve_in(span)
        with ReaderWatch(60) as reader, span:
            request = EngineRequest(1, [0], commands, reader, Turns(), lambda: None)
            request.add_tokens(0, [5] * (MAX_BUFFERED_TOKENS + 1), (), 0.0)

    with collecting() as (collector, endpoint):
        tracer = OtlpTracer("detokenizer", endpoint, 1.0)
        await asyncio.create_task(park(tracer))
        await tracer.close()
    assert collector.trace(client).one("detokenizer", "Serve").events == ["parked"]
