"""Tools at the HTTP door."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvern.services.gateway.chat_request import NO_FORMAT, ChatCompletionRequest, OutputFormats
from kvern.v1 import inference_pb2

from .scripted_router import STARTED, delta, finished, responds, says
from .setup import USER, Setup

pytestmark = pytest.mark.asyncio(loop_scope="package")

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str, parameters: dict[str, Any] | None = PARAMETERS) -> dict[str, Any]:
    function = {"name": name, "description": "Does it.", "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


TOOLS = [tool("weather"), tool("time", None)]
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS}}
FORCED = '[{"name": "weather", "parameters": {"city": "R}o\\"m{e"}}, {"name": "time", "parameters": {}}]'


def calls_of(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put together calls as clients do, and check the form of what they come in."""
    calls: list[dict[str, Any]] = []
    for each in (call for part in deltas for call in part.get("tool_calls", ())):
        if each["index"] == len(calls):
            assert (each["type"], bool(each["id"])) == ("function", True)
            calls.append({"name": each["function"]["name"], "arguments": each["function"]["arguments"]})
        else:
            assert each.keys() == {"index", "function"}
            calls[each["index"]]["arguments"] += each["function"]["arguments"]
    return calls


async def test_tools_reach_the_template_and_special_tokens_are_shown(setup: Setup) -> None:
    request = await setup.asked(tools=TOOLS)
    told = json.loads(request.chat.tools_json)
    assert [each["function"]["name"] for each in told] == ["weather", "time"]
    assert told[0]["function"]["parameters"] == PARAMETERS
    assert request.output.skip_special_tokens is False
    assert not request.HasField("constraint")


async def test_tools_with_choice_none_are_not_told_of(setup: Setup) -> None:
    setup.router.behaviour = says(HERMES)
    message = await setup.message(tools=TOOLS, tool_choice="none")
    assert message["content"] == HERMES
    assert setup.router.received[0].chat.tools_json == ""


async def test_call_that_the_model_makes_is_told_in_openai_form(setup: Setup) -> None:
    setup.router.behaviour = says(HERMES, size=3)
    message = await setup.message(tools=TOOLS)
    [call] = message["tool_calls"]
    assert (message["content"], message["finish_reason"]) == (None, "tool_calls")
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    assert call["id"].isalnum()
    assert len(call["id"]) == 9


async def test_call_that_the_model_makes_is_streamed_in_deltas(setup: Setup) -> None:
    setup.router.behaviour = says("Let me see. " + HERMES, size=3)
    deltas = await setup.deltas(tools=TOOLS)
    [call] = calls_of(deltas)
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Rome"})
    assert "".join(each.get("content", "") for each in deltas).strip() == "Let me see."


async def test_end_token_that_is_shown_for_the_parser_is_not_for_the_client(setup: Setup) -> None:
    setup.router.behaviour = responds(STARTED, delta("Sunny."), delta("<|im_end|>"), finished())
    message = await setup.message(tools=TOOLS)
    assert (message["content"], message["finish_reason"]) == ("Sunny.", "stop")


async def test_second_call_is_dropped_where_calls_may_not_be_parallel(setup: Setup) -> None:
    setup.router.behaviour = says(HERMES + HERMES)
    assert len((await setup.message(tools=TOOLS))["tool_calls"]) == 2
    assert len((await setup.message(tools=TOOLS, parallel_tool_calls=False))["tool_calls"]) == 1


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_required_calls_are_read_as_they_come(setup: Setup, size: int) -> None:
    setup.router.behaviour = says(FORCED, size=size)
    calls = calls_of(await setup.deltas(tools=TOOLS, tool_choice="required"))
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("weather", {"city": 'R}o"m{e'}),
        ("time", {}),
    ]
    message = await setup.message(tools=TOOLS, tool_choice="required")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "time"]
    assert (message["content"], message["finish_reason"]) == (None, "tool_calls")


async def test_required_calls_constrain_the_output_to_one_of_the_tools(setup: Setup) -> None:
    request = await setup.asked(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    schema = json.loads(request.constraint.json_schema)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    first, second = schema["items"]["anyOf"]
    assert first["properties"] == {"name": {"const": "weather"}, "parameters": PARAMETERS}
    assert second["properties"]["parameters"]["additionalProperties"] is False
    assert not request.output.HasField("skip_special_tokens")


async def test_named_function_constrains_the_output_to_its_arguments(setup: Setup) -> None:
    setup.router.behaviour = says('{"city": "Rome"}', size=4)
    choice = {"type": "function", "function": {"name": "weather"}}
    message = await setup.message(tools=TOOLS, tool_choice=choice)
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert message["finish_reason"] == "tool_calls"
    [request] = setup.router.received
    assert json.loads(request.constraint.json_schema) == PARAMETERS
    [streamed] = calls_of(await setup.deltas(tools=TOOLS, tool_choice=choice))
    assert streamed == {"name": "weather", "arguments": '{"city": "Rome"}'}


async def test_tools_with_a_format_constrain_the_output_to_either(setup: Setup) -> None:
    request = await setup.asked(tools=TOOLS, response_format=FORMAT, parallel_tool_calls=False)
    tag = json.loads(request.constraint.structural_tag)
    content, *calls = tag["format"]["elements"]
    assert content == {"type": "json_schema", "json_schema": PARAMETERS}
    assert len(calls) == 3
    assert calls[0]["stop_after_first"] is True
    assert request.output.skip_special_tokens is False


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_answer_to_tools_with_a_format_is_content_or_calls_and_never_reasons(setup: Setup, size: int) -> None:
    fields = {"tools": TOOLS, "response_format": FORMAT, "chat_template_kwargs": {"thinking": True}}
    setup.router.behaviour = says('{"city": "</think>Rome"}', size=size)
    message = await setup.message(**fields)
    assert (message["content"], message["finish_reason"]) == ('{"city": "</think>Rome"}', "stop")
    setup.router.behaviour = says(HERMES, size=size)
    message = await setup.message(**fields)
    assert (message["content"], message["finish_reason"]) == (None, "tool_calls")
    assert setup.router.tokenized == []


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_call_that_must_be_is_held_to_the_tools_alone_whatever_the_format(setup: Setup, choice: object) -> None:
    with_format = await setup.asked(tools=TOOLS, tool_choice=choice, response_format={"type": "json_object"})
    assert with_format.constraint == (await setup.asked(tools=TOOLS, tool_choice=choice)).constraint
    assert (await setup.asked(tools=TOOLS, tool_choice=choice, guided_regex="a")).constraint == with_format.constraint


async def test_format_text_or_tools_that_may_not_be_called_constrain_nothing_more(setup: Setup) -> None:
    request = await setup.asked(tools=TOOLS, response_format={"type": "text"})
    assert not request.HasField("constraint")
    request = await setup.asked(tools=TOOLS, response_format=FORMAT, tool_choice="none")
    assert json.loads(request.constraint.json_schema) == PARAMETERS


@pytest.mark.parametrize("given", [{"response_format": {"type": "json_object"}}, {"guided_regex": "a"}])
async def test_format_alone_counts_where_calls_are_not_read(given: dict[str, Any]) -> None:
    fields = {"messages": [USER], "tools": TOOLS, **given}
    body = ChatCompletionRequest.model_validate(fields)
    body.check()
    request = body.to_generate(OutputFormats(tool_calls=NO_FORMAT, reasoning="auto"))
    assert request.constraint.WhichOneof("kind") in ("json_object", "regex")
    assert not request.output.HasField("skip_special_tokens")


async def test_required_call_out_of_tokens_ends_with_length(setup: Setup) -> None:
    setup.router.behaviour = responds(STARTED, delta(FORCED[:40]), finished(inference_pb2.FINISH_REASON_LENGTH))
    message = await setup.message(tools=TOOLS, tool_choice="required")
    assert message["finish_reason"] == "length"
    assert message["tool_calls"][0]["function"]["arguments"] == FORCED[35:40]


async def test_replayed_call_with_arguments_as_text_or_object_gives_the_same_prompt(setup: Setup) -> None:
    """B18."""
    chats = []
    for arguments in ('{"city": "Rome"}', {"city": "Rome"}):
        call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
        chats.append((await setup.asked(messages=messages)).chat)
    assert chats[0] == chats[1]
    [call] = json.loads(chats[0].messages[1].tool_calls_json)
    assert call == {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


async def test_nulls_in_tools_and_calls_are_as_if_absent(setup: Setup) -> None:
    """Templates would take null for a value: what is absent they leave out."""
    parameters = {"type": "object", "properties": {"city": {"default": None}}}
    function = {"name": "f", "description": None, "parameters": parameters, "strict": None}
    call = {"id": None, "type": None, "index": None, "function": {"name": "f", "arguments": "{}"}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    chat = (await setup.asked(messages=messages, tools=[{"type": "function", "function": function}])).chat
    [told] = json.loads(chat.tools_json)
    assert told["function"] == {"name": "f", "parameters": parameters}
    [replayed] = json.loads(chat.messages[1].tool_calls_json)
    assert replayed == {"type": "function", "function": {"name": "f", "arguments": "{}"}}


async def test_replayed_call_without_arguments_is_one_with_none(setup: Setup) -> None:
    call = {"id": "a", "index": 0, "type": "function", "function": {"name": "time", "arguments": ""}}
    chat = (await setup.asked(messages=[USER, {"role": "assistant", "tool_calls": [call]}])).chat
    assert json.loads(chat.messages[1].tool_calls_json)[0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice.function.name", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "any"}),
        ("tools[1].function.name", {"tools": [tool("a"), tool("a")]}),
        ("tools[0].function.name", {"tools": [tool("a b")]}),
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("tools[0].type", {"tools": [{"type": "web_search", "function": {"name": "a"}}]}),
        ("tools", {"tools": [tool(f"f{number}") for number in range(129)]}),
        ("guided_regex", {"tools": TOOLS, "guided_regex": "a"}),
        ("structured_outputs.choice", {"tools": TOOLS, "structured_outputs": {"choice": ["a"]}}),
        ("guided_json", {"tools": TOOLS, "guided_json": "[]"}),
        ("guided_json", {"tools": TOOLS, "guided_json": "{}", "response_format": {"type": "json_object"}}),
        ("response_format.json_schema", {"tools": TOOLS, "response_format": {"type": "json_schema"}}),
        (
            "response_format.json_schema",
            {"tools": TOOLS, "response_format": {"type": "json_schema"}, "tool_choice": "required"},
        ),
        (
            "messages[0].tool_calls[0].function.arguments",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
        ),
    ],
)
async def test_tools_that_cannot_be_are_refused_by_name(setup: Setup, param: str, fields: dict[str, object]) -> None:
    assert (await setup.refused(**fields))["param"] == param
