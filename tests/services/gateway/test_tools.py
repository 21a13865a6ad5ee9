"""What outputs are held to where a tool must be called."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from kvern.services.gateway.chat_request import ChatCompletionRequest, OutputFormats
from kvern.services.gateway.chat_response import parser_opener
from kvern.services.gateway.forced_calls import open_listed_calls
from kvern.services.gateway.parsing import Content, ToolCallArguments, ToolCallBegins
from kvern.services.gateway.tools import FunctionDefinition, Tool, schema_of_arguments, schema_of_calls

TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "value": {"$ref": "#/$defs/Value"}},
    "required": ["value"],
    "$defs": {"Value": {"type": "integer"}},
}
NAMED_REF = {"type": "object", "properties": {"$ref": {"type": "string"}}, "additionalProperties": False}


def tool(name: str, parameters: dict[str, Any] | None) -> Tool:
    return Tool(type="function", function=FunctionDefinition(name=name, parameters=parameters))


TOOLS = [tool("none", None), tool("tree", TREE), tool("named", NAMED_REF)]


def call(name: str, parameters: object) -> dict[str, object]:
    return {"name": name, "parameters": parameters}


@pytest.mark.parametrize(
    ("calls", "is_right"),
    [
        ([call("none", {})], True),
        ([call("none", {"a": 1})], False),
        ([call("tree", {"value": 1, "left": {"value": 2}})], True),
        ([call("tree", {"value": 1, "left": {"value": "x"}})], False),
        ([call("tree", {"left": {}})], False),
        ([call("named", {"$ref": "#/x"}), call("none", {})], True),
        ([call("other", {})], False),
        ([call("none", {}) | {"more": 1}], False),
        ([], False),
    ],
)
def test_schema_of_calls_holds_each_to_its_own_tool(calls: list[object], is_right: bool) -> None:
    schema = json.loads(schema_of_calls(TOOLS, in_parallel=True).json_schema)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert jsonschema.Draft202012Validator(schema).is_valid(calls) is is_right


def test_schema_of_calls_that_may_not_be_parallel_has_room_for_one() -> None:
    schema = json.loads(schema_of_calls(TOOLS, in_parallel=False).json_schema)
    assert not jsonschema.Draft202012Validator(schema).is_valid([call("none", {})] * 2)


def test_schema_of_arguments_is_an_object_s() -> None:
    assert json.loads(schema_of_arguments(tool("a", {"properties": {}})).json_schema)["type"] == "object"


@pytest.mark.parametrize("tool_format", ["none", "hermes"])
def test_output_is_searched_in_the_format_that_is_set(tool_format: str) -> None:
    tools = [each.model_dump() for each in TOOLS]
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": tools})
    formats = OutputFormats(tool_format, "none")
    is_searched = tool_format != "none"
    assert body.to_generate(formats).output.HasField("skip_special_tokens") is is_searched
    parser = parser_opener(body, formats)()
    text = '<tool_call>{"name": "none", "arguments": {}}</tool_call>'
    pieces = [*parser.push(text), *parser.finish()]
    assert (pieces[0] == ToolCallBegins(0, "none")) is is_searched
    assert (pieces == [Content(text)]) is not is_searched


@pytest.mark.parametrize("space", ["", " ", "\n  "])
@pytest.mark.parametrize("size", [1, 3, 500])
def test_listed_calls_are_read_however_they_are_spaced_and_cut(space: str, size: int) -> None:
    arguments = ['{"a":"}\\\\\\"{","b":{"c":[{}]}}', "{}", '{"\\\\":"\\u007d"}']
    objects = [
        f'{{{space}"name"{space}:{space}"f\\u0031"{space},{space}"parameters"{space}:{space}{each}}}'
        for each in arguments
    ]
    text = f"[{space}" + f"{space},{space}".join(objects) + f"{space}]"
    reader = open_listed_calls(["f1"])
    pieces = [piece for start in range(0, len(text), size) for piece in reader.push(text[start : start + size])]
    assert [piece.name for piece in pieces if isinstance(piece, ToolCallBegins)] == ["f1"] * 3
    told = ["", "", ""]
    for piece in pieces:
        if isinstance(piece, ToolCallArguments):
            told[piece.index] += piece.text
    assert told == arguments
