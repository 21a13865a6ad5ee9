"""Chats at the HTTP door: what reaches the router, and what comes back."""

from __future__ import annotations

import json

import pytest

from kvern.services.gateway.logprobs import MAX_HELD_OF_CHAT
from kvern.services.runtime.errors import Unavailable
from kvern.v1 import inference_pb2

from .scripted_router import SCHEDULED, STARTED, delta, fails_after, finished, logprob, responds, says
from .setup import USER, Setup

pytestmark = pytest.mark.asyncio(loop_scope="package")

LENGTH = inference_pb2.FINISH_REASON_LENGTH


async def test_chat_answers_in_openai_form(setup: Setup) -> None:
    setup.router.behaviour = responds(STARTED, delta("Hel"), delta(""), delta("lo"), finished())
    response = await setup.chat(model="tiny", request_id="r1")
    answer = response.json()
    assert response.status_code == 200
    assert answer.pop("created") > 0
    assert answer == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def test_chat_out_of_tokens_finishes_with_length(setup: Setup) -> None:
    setup.router.behaviour = responds(STARTED, finished(LENGTH))
    assert (await setup.message())["finish_reason"] == "length"


async def test_chat_stream_sends_chunks_then_done(setup: Setup) -> None:
    setup.router.behaviour = responds(STARTED, delta("Hel"), delta(""), delta("lo ⛄"), finished())
    *chunks, done = await setup.events(model="tiny", request_id="r1")
    assert done == "[DONE]"
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-r1"}
    assert {chunk["model"] for chunk in chunks} == {"tiny"}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo ⛄"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]


async def test_chat_stream_with_usage_ends_with_it(setup: Setup) -> None:
    *chunks, last, done = await setup.events(stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 9
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_chat_stream_with_continuous_usage_tells_it_in_each_chunk(setup: Setup) -> None:
    setup.router.behaviour = responds(STARTED, SCHEDULED, delta("a"), delta("b", num_tokens=3), finished(LENGTH))
    *chunks, _ = await setup.events(stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 4, 2]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {7}
    assert chunks[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_chat_of_several_choices_keeps_them_apart(setup: Setup) -> None:
    """A24."""
    setup.router.behaviour = responds(
        STARTED, delta("<think>a", 0), delta("b", 1), delta("</think>c", 0), finished(index=1), finished(index=0)
    )
    choices = (await setup.chat(n=2)).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert [choice["message"]["content"] for choice in choices] == ["c", "b"]
    assert [choice["message"].get("reasoning_content") for choice in choices] == ["a", None]


async def test_chat_request_reaches_router_whole(setup: Setup) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": parts, "name": "me"},
        {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "why", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    request = await setup.asked(
        model="tiny", messages=messages, temperature=0, top_p=0.5, top_k=3, seed=-1, max_tokens=5, stop="x", user="u"
    )
    system, user, assistant, tool = request.chat.messages
    assert request.model == "tiny"
    assert (system.HasField("content"), system.content) == (True, "")
    assert (user.role, user.content, user.name) == ("user", "a\nb", "me")
    assert (assistant.HasField("content"), json.loads(assistant.tool_calls_json)) == (True, [call])
    assert assistant.reasoning_content == "why"
    assert (tool.content, tool.tool_call_id) == ("4", "1")
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0, 0.5, 3)
    assert request.sampling.HasField("temperature")
    assert request.sampling.seed == 2**64 - 1
    assert (request.stopping.max_tokens, list(request.stopping.stop)) == (5, ["x"])


async def test_chat_developer_is_the_system_to_templates(setup: Setup) -> None:
    request = await setup.asked(
        messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "x"}]
    )
    assert [message.role for message in request.chat.messages] == ["system", "user"]


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}, {"temperature": None, "stop": None, "n": None}])
async def test_chat_null_or_absent_leaves_default_to_contract(setup: Setup, fields: dict[str, None]) -> None:
    """B20."""
    request = await setup.asked(**fields)
    assert not request.stopping.HasField("max_tokens")
    assert not request.sampling.ListFields()
    assert not request.stopping.stop


async def test_chat_neutral_values_of_unsupported_fields_are_accepted(setup: Setup) -> None:
    neutral = {
        "n": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "logit_bias": {},
        "logprobs": False,
        "top_logprobs": None,
        "response_format": {"type": "text"},
        "tools": [],
        "stream_options": None,
        "store": False,
        "length_penalty": 1,
    }
    response = await setup.chat(**neutral)
    assert response.status_code == 200, response.text


async def test_chat_template_fields_reach_the_template(setup: Setup) -> None:
    chat = (
        await setup.asked(
            messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "I"}],
            continue_final_message=True,
            add_generation_prompt=False,
            chat_template_kwargs={"enable_thinking": False},
            reasoning_effort="low",
        )
    ).chat
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)
    assert json.loads(chat.template_kwargs_json) == {"enable_thinking": False, "reasoning_effort": "low"}


async def test_chat_reasoning_is_a_part_of_its_own_and_its_tokens_are_counted(setup: Setup) -> None:
    setup.router.behaviour = responds(
        STARTED, delta("<think>", num_tokens=1), delta("hm ", num_tokens=2), delta("so</think>"), delta("4"), finished()
    )
    answer = (await setup.chat()).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"].strip(), message["content"]) == ("hm so", "4")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    deltas = await setup.deltas()
    assert "".join(each.get("reasoning_content", "") for each in deltas).strip() == "hm so"
    assert "".join(each.get("content", "") for each in deltas) == "4"


async def test_chat_whose_template_opens_reasoning_is_answered_from_within(setup: Setup) -> None:
    setup.router.behaviour = says("hm</think>4", size=3)
    variables = {"thinking": "looked at once"}
    for _ in range(2):
        message = await setup.message(chat_template_kwargs=variables)
        assert (message["reasoning_content"], message["content"]) == ("hm", "4")
    assert len(setup.router.tokenized) == 1
    assert setup.router.tokenized[0].chat.messages[0].content == "Hello"
    assert (await setup.message())["content"] == "hm</think>4"
    messages = [USER, {"role": "assistant", "content": "I"}]
    going_on = await setup.message(messages=messages, continue_final_message=True, chat_template_kwargs=variables)
    assert going_on["content"] == "hm</think>4"


async def test_chat_s_template_is_looked_at_by_the_name_of_the_model_that_answers(setup: Setup) -> None:
    """Also where the request names none; and not before there is one: while replicas start, nothing can be found."""
    setup.router.behaviour = fails_after(Unavailable("no replica is ready"))
    variables = {"thinking": "by name"}
    assert (await setup.chat(chat_template_kwargs=variables)).status_code == 503
    assert setup.router.tokenized == []
    setup.router.behaviour = says("hm</think>4")
    for fields in ({}, {"model": "tiny"}):
        assert (await setup.message(chat_template_kwargs=variables, **fields))["reasoning_content"] == "hm"
    assert [request.model for request in setup.router.tokenized] == ["tiny"]


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"guided_regex": "."}, {"guided_choice": ["{}"]}]
)
async def test_chat_held_to_a_form_is_content_where_the_template_opens_reasoning(
    setup: Setup, fields: dict[str, object]
) -> None:
    setup.router.behaviour = says('{"a": "</think>"}', size=3)
    message = await setup.message(chat_template_kwargs={"thinking": True}, **fields)
    assert message["content"] == '{"a": "</think>"}'
    assert "reasoning_content" not in message


async def test_chat_held_to_a_structural_format_as_a_whole_is_content(setup: Setup) -> None:
    setup.router.behaviour = says("hm</think>4")
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "hm</think>4"}}
    fields = {"structured_outputs": {"structural_tag": tag}, "chat_template_kwargs": {"thinking": True}}
    assert (await setup.message(**fields))["content"] == "hm</think>4"


@pytest.mark.parametrize(
    "given",
    [
        {"reasoning": "why"},
        {"reasoning": "why", "reasoning_content": "why"},
        {"reasoning": "", "reasoning_content": "why"},
    ],
)
async def test_replayed_reasoning_is_taken_by_either_name(setup: Setup, given: dict[str, str]) -> None:
    request = await setup.asked(messages=[USER, {"role": "assistant", "content": "4", **given}, USER])
    assert request.chat.messages[1].reasoning_content == "why"


async def test_replayed_reasoning_by_two_names_that_differ_is_refused(setup: Setup) -> None:
    message = {"role": "assistant", "content": "4", "reasoning": "a", "reasoning_content": "b"}
    error = await setup.refused(messages=[USER, message])
    assert (error["param"], error["message"].partition(":")[0]) == ("messages[1].reasoning", "messages[1].reasoning")


async def test_chat_with_constrained_tags_in_free_text_may_reason(setup: Setup) -> None:
    setup.router.behaviour = says("hm</think>4")
    fields = {"structured_outputs": {"structural_tag": {"a": 1}}, "chat_template_kwargs": {"thinking": True}}
    assert (await setup.message(**fields))["content"] == "4"


@pytest.mark.parametrize("text", ["a < b", "no <tool_call> asked for", "x</s>", '{"name": "f", "parameters": {}}'])
async def test_chat_without_tools_or_reasoning_passes_as_it_is(setup: Setup, text: str) -> None:
    setup.router.behaviour = says(text, size=2)
    assert (await setup.message())["content"] == text
    assert "".join(each["content"] for each in await setup.deltas()) == text
    assert not setup.router.received[-1].output.HasField("skip_special_tokens")


async def test_chat_logprobs_have_each_token_with_its_bytes(setup: Setup) -> None:
    """A19, A20: bytes joined are the text, alternatives have their own."""
    first, rest = logprob("Hé"[:1], -0.5, H=-0.5, J=-1.5), logprob("Hé"[1:], float("-inf"))
    setup.router.behaviour = responds(STARTED, delta("Hé", logprobs=[first, rest]), finished())
    answer = (await setup.chat(logprobs=True, top_logprobs=2)).json()
    assert setup.router.received[0].output.logprobs == 2
    content = answer["choices"][0]["logprobs"]["content"]
    assert [(each["token"], each["logprob"], each["bytes"]) for each in content] == [
        ("H", -0.5, [72]),
        ("é", -9999.0, [195, 169]),
    ]
    assert [each["token"] for each in content[0]["top_logprobs"]] == ["H", "J"]
    *chunks, _ = await setup.events(logprobs=True)
    assert setup.router.received[1].output.HasField("logprobs")
    told = [each["choices"][0]["logprobs"] for each in chunks]
    assert [each["content"] for each in told if each] == [content]


async def test_chat_logprobs_of_text_that_is_held_back_come_with_a_later_chunk(setup: Setup) -> None:
    behaviour = responds(
        STARTED, delta("<thi", logprobs=[logprob("<thi", -1)]), delta("s", logprobs=[logprob("s", -2)]), finished()
    )
    setup.router.behaviour = behaviour
    *chunks, _ = await setup.events(logprobs=True)
    told = [each["choices"][0]["logprobs"] for each in chunks]
    assert [token["token"] for each in told if each for token in each["content"]] == ["<thi", "s"]


async def test_chat_with_more_logprobs_than_an_answer_may_hold_is_refused(setup: Setup) -> None:
    most = [delta("a", logprobs=[logprob("a", -1)] * 4096)] * (MAX_HELD_OF_CHAT // 4096)
    setup.router.behaviour = responds(STARTED, *most, delta("a", logprobs=[logprob("a", -1)]), finished())
    response = await setup.chat(logprobs=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "top_logprobs")
