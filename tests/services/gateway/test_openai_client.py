"""OpenAI's own client against a whole set with the real small model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam

from tests.up_process import MAX_MODEL_LEN, UpProcess

MODEL = "smollm2"
FRANCE: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
ROME: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How is the weather in Rome, and the time?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Rome", "Oslo"]}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]
SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 12}},
    "required": ["capital"],
    "additionalProperties": False,
}


def _url(running_set: UpProcess) -> str:
    return f"http://{running_set.http}/v1"


@pytest.fixture
def api(running_set: UpProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=_url(running_set), api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest_asyncio.fixture
async def async_api(running_set: UpProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=_url(running_set), api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_models_are_listed_and_found(api: openai.OpenAI) -> None:
    [model] = api.models.list().data
    assert model.id == MODEL
    assert api.models.retrieve(MODEL).id == MODEL


def test_chat_streamed_and_not_is_the_same_right_answer(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_completion_tokens=16)
    assert answer.usage is not None
    assert "Paris" in (text := answer.choices[0].message.content or "")
    with api.chat.completions.create(
        model=MODEL,
        messages=FRANCE,
        temperature=0,
        max_completion_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert last.usage is not None
    assert last.usage.completion_tokens == answer.usage.completion_tokens
    assert last.usage.prompt_tokens_details is not None
    assert (last.usage.prompt_tokens_details.cached_tokens or 0) >= 16


def test_completion_of_text_and_of_its_token_ids_is_the_same(api: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    token_ids = api.post("/../tokenize", body={"prompt": prompt}, cast_to=dict[str, Any])["tokens"]  # type: ignore[type-var]
    prompts: list[Any] = [prompt, token_ids, [token_ids, token_ids]]
    answers = [api.completions.create(model=MODEL, prompt=each, temperature=0, max_tokens=4) for each in prompts]
    assert len({choice.text for answer in answers for choice in answer.choices}) == 1
    assert "Paris" in answers[0].choices[0].text
    assert [len(answer.choices) for answer in answers] == [1, 1, 2]


def test_completion_with_echo_and_logprobs_tells_of_every_token(api: openai.OpenAI) -> None:
    """A22 with log-probabilities: what evaluations by likelihood ask for."""
    prompt = "The capital of France is Paris"
    answer = api.completions.create(model=MODEL, prompt=prompt, echo=True, logprobs=2, max_tokens=0)
    choice, told = answer.choices[0], answer.choices[0].logprobs
    assert answer.usage is not None
    assert (choice.text, answer.usage.completion_tokens) == (prompt, 0)
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert "".join(told.tokens) == prompt
    assert len(told.tokens) == answer.usage.prompt_tokens
    assert told.token_logprobs[0] is None
    assert all(value < 0 for value in told.token_logprobs[1:])
    places = zip(told.text_offset or [], told.tokens, strict=True)
    assert all(prompt[offset:].startswith(token) for offset, token in places)


def test_logprobs_of_a_chat_are_the_texts(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    told = choice.logprobs.content or []
    assert b"".join(bytes(each.bytes or []) for each in told).decode() == choice.message.content
    assert all(each.logprob == each.top_logprobs[0].logprob for each in told)


def test_json_schema_is_followed(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(
        model=MODEL,
        messages=FRANCE,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA, "strict": True}},
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)


def test_answer_to_tools_with_a_json_schema_is_content_that_follows_it_or_a_call(api: openai.OpenAI) -> None:
    """Examples in the chat lead the small model to the one and to the other."""
    called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 1}}\n</tool_call>'
    italy: Any = {"role": "user", "content": "What is the capital of Italy?"}
    oslo: Any = {"role": "user", "content": "And in Oslo?"}
    choices = []
    for asked, said, asked_next in ((italy, '{"capital": "Rome"}', FRANCE[0]), (ROME[0], called, oslo)):
        messages: Any = [asked, {"role": "assistant", "content": said}, asked_next]
        answer = api.chat.completions.create(
            model=MODEL,
            messages=messages,
            temperature=0,
            max_tokens=64,
            tools=TOOLS,
            parallel_tool_calls=False,
            response_format={"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA}},
        )
        choices.append(answer.choices[0])
    content, calls = choices
    assert (content.finish_reason, content.message.tool_calls) == ("stop", None)
    jsonschema.validate(json.loads(content.message.content or ""), SCHEMA)
    assert (calls.finish_reason, calls.message.content) == ("tool_calls", None)
    [call] = calls.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)


def test_named_function_is_called_with_arguments_of_its_schema(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(
        model=MODEL,
        messages=ROME,
        temperature=0,
        max_tokens=64,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)


def test_required_call_is_streamed_and_its_replay_is_answered(api: openai.OpenAI) -> None:
    with api.chat.completions.stream(
        model=MODEL,
        messages=ROME,
        temperature=0,
        max_tokens=96,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
    ) as stream:
        for _ in stream:
            pass
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        jsonschema.validate(arguments, WEATHER)
    else:
        assert (call.function.name, arguments) == ("time", {})
    said = {**choice.message.to_dict(), "content": None}  # as it is where nothing was streamed
    replay: Any = [*ROME, said, {"role": "tool", "tool_call_id": call.id, "content": "sunny, noon"}]
    answer = api.chat.completions.create(model=MODEL, messages=replay, tools=TOOLS, max_tokens=2)
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("kind", "param", "fields"),
    [
        (openai.NotFoundError, "model", {"model": "huge"}),
        (openai.BadRequestError, "messages", {"messages": [{"role": "user", "content": "a " * MAX_MODEL_LEN}]}),  # B17
        (openai.BadRequestError, "max_tokens", {"max_tokens": MAX_MODEL_LEN}),  # B17
        (openai.BadRequestError, "top_p", {"top_p": 1.1}),  # D13
        (openai.BadRequestError, "logit_bias.49152", {"logit_bias": {"49152": 1}}),  # D05
        (openai.BadRequestError, "stop[0]", {"stop": [""]}),  # A14
        (openai.BadRequestError, "response_format", {"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"type": "nothing"}}}}),
        # The model's tokens cannot write some characters.
        (openai.BadRequestError, None, {"extra_body": {"structured_outputs": {"regex": "a\U00080000"}}}),
    ],
)  # fmt: skip
def test_errors_are_the_client_s_own(
    api: openai.OpenAI, kind: type[openai.APIStatusError], param: str | None, fields: dict[str, Any]
) -> None:
    with pytest.raises(kind) as raised:
        api.chat.completions.create(**{"model": MODEL, "messages": FRANCE, **fields})
    assert raised.value.param == param
    assert raised.value.message
    assert raised.value.request_id


async def test_streams_that_are_left_end_and_others_go_on(
    async_api: openai.AsyncOpenAI, running_set: UpProcess
) -> None:
    """E01."""
    for route in (async_api.chat.completions.create, async_api.completions.create):
        prompt: Any = {"messages": FRANCE} if route == async_api.chat.completions.create else {"prompt": ["a", "b"]}
        stream = await route(model=MODEL, max_tokens=300, stream=True, extra_body={"ignore_eos": True}, **prompt)
        async for _ in stream:
            break
        await stream.close()
    running_set.wait_idle()
    answer = await async_api.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=8)
    assert "Paris" in (answer.choices[0].message.content or "")


async def test_extensions_of_the_body_are_taken(async_api: openai.AsyncOpenAI) -> None:
    """What benchmarks of servers send."""
    answer = await async_api.chat.completions.create(
        model=MODEL,
        messages=FRANCE,
        max_tokens=5,
        max_completion_tokens=5,
        extra_body={
            "ignore_eos": True,
            "min_tokens": 5,
            "top_k": -1,
            "cache_salt": "mine",
            "priority": 1,
            "stop": None,
        },
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
