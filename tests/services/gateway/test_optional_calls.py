"""Answers that are tool calls or else content of a form, with the grammar library and the real small model's tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer

from kvern.engine import grammar
from kvern.engine.constraint import Constraint, ConstraintKind
from kvern.services.gateway.errors import ApiError
from kvern.services.gateway.optional_calls import content_or_calls
from kvern.services.gateway.parsing import TOOL_FORMATS, Content, ToolCallBegins, open_parser
from kvern.services.gateway.tools import FunctionDefinition, Tool
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import load_tokenizer
from kvern.v1 import inference_pb2

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Rome", "Oslo"]}},
}
TOOLS = [
    Tool(type="function", function=FunctionDefinition(name="time")),
    Tool(type="function", function=FunctionDefinition(name="time_in", parameters=CITY)),
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>")

ROME = '{"city": "Rome"}'
FORMATS = [name for name in TOOL_FORMATS if name != "none"]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama3(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def mistral(name: str, arguments: str) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{arguments}"


LISTED = f'{{"name": "time", "arguments": {{}}}}, {{"name": "time_in", "arguments": {ROME}}}'
ONE_CALL = [
    ("hermes", hermes("time_in", ROME)),
    ("llama3", llama3("time_in", ROME)),
    ("llama3", "<|python_tag|>" + llama3("time_in", ROME)),
    ("mistral", mistral("time_in", ROME)),
    ("mistral", f"[TOOL_CALLS]time_in{ROME}"),
    ("mistral", f'[TOOL_CALLS] [{{"name": "time_in", "arguments": {ROME}}}]'),
]
TWO_CALLS = [
    ("hermes", hermes("time", "{}") + "\n" + hermes("time_in", ROME)),
    ("llama3", llama3("time", "{}") + "; " + llama3("time_in", ROME)),
    ("mistral", mistral("time", "{}") + mistral("time_in", ROME)),
    ("mistral", f"[TOOL_CALLS][{LISTED}]"),
]
NO_CALLS = [
    ("hermes", hermes("time_in", '{"city": "Paris"}')),
    ("hermes", hermes("times", "{}")),
    ("hermes", "<tool_call>"),
    ("hermes", llama3("time", "{}")),
    ("llama3", llama3("time_in", "{}")),
    ("llama3", llama3("time", "{}") + "; "),
    ("llama3", "<|python_tag|>time()"),
    ("mistral", mistral("time_in", '{"city": "Paris"}')),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", hermes("time", "{}")),
]


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    """Has none of the markers as a token."""
    return load_tokenizer(find_model("smollm2")).backend


@pytest.fixture(scope="module")
def special(plain: Tokenizer) -> Tokenizer:
    """Has all of the markers as tokens, as those of the models concerned have their own."""
    copy = Tokenizer.from_str(plain.to_str())
    # Those of Qwen are not called special, and are treated so all the same.
    copy.add_tokens([AddedToken(token, special=token[1:] != "tool_call>", normalized=False) for token in SPECIAL])
    return copy


@pytest.fixture(scope="module")
def libraries(plain: Tokenizer, special: Tokenizer) -> dict[int, LLTokenizer]:
    """The grammar library's view of each."""
    return {id(each): LLTokenizer(each.to_str(), n_vocab=each.get_vocab_size()) for each in (plain, special)}


@pytest.fixture(params=["plain", "special"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return tokenizer


class Door:
    """Says which outputs are let through."""

    def __init__(self, tokenizer: Tokenizer, library: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._library = library

    def accepts(
        self, output: str, tool_format: str, content: dict[str, Any] = SCHEMA, *, in_parallel: bool = True
    ) -> bool:
        constraint = content_or_calls("f", schema(content), TOOLS, tool_format, in_parallel=in_parallel)
        tag = Constraint(ConstraintKind.STRUCTURAL_TAG, constraint.structural_tag)
        matcher = grammar.new_matcher(tag, self._library)
        token_ids = self._tokenizer.encode(output, add_special_tokens=False).ids
        return all(matcher.consume_token(token_id) for token_id in token_ids) and matcher.is_accepting()


@pytest.fixture
def door(tokenizer: Tokenizer, libraries: dict[int, LLTokenizer]) -> Door:
    return Door(tokenizer, libraries[id(tokenizer)])


def schema(content: dict[str, Any]) -> inference_pb2.Constraint:
    return inference_pb2.Constraint(json_schema=json.dumps(content))


def read(output: str, tool_format: str) -> tuple[str, list[str]]:
    """Return what the parser makes of an output: the content, and the names of calls."""
    parser = open_parser(tools=[tool.function.name for tool in TOOLS], tool_format=tool_format, reasoning_format="none")
    pieces = [*parser.push(output), *parser.finish()]
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    return content, [piece.name for piece in pieces if isinstance(piece, ToolCallBegins)]


@pytest.mark.parametrize(("tool_format", "output"), ONE_CALL)
def test_one_call_in_its_format_is_let_through_and_read(door: Door, tool_format: str, output: str) -> None:
    for name in (tool_format, "auto"):
        for in_parallel in (True, False):
            assert door.accepts(output, name, in_parallel=in_parallel)
        assert read(output, name) == ("", ["time_in"])


@pytest.mark.parametrize(("tool_format", "output"), TWO_CALLS)
def test_two_calls_are_let_through_only_where_calls_may_be_parallel(door: Door, tool_format: str, output: str) -> None:
    for name in (tool_format, "auto"):
        assert door.accepts(output, name)
        assert not door.accepts(output, name, in_parallel=False)
        assert read(output, name) == ("", ["time", "time_in"])


@pytest.mark.parametrize(("tool_format", "output"), NO_CALLS)
def test_what_is_no_call_of_the_tools_is_not_let_through(door: Door, tool_format: str, output: str) -> None:
    assert not door.accepts(output, tool_format)


@pytest.mark.parametrize("tool_format", FORMATS)
def test_content_is_let_through_where_it_holds_to_the_schema(door: Door, tool_format: str) -> None:
    good = '{"name": "time", "age": 5}'
    assert door.accepts(good, tool_format)
    assert read(good, tool_format) == (good, [])
    for bad in ("", "Sunny.", "{}", '{"name": "time"}', '{"name": "x", "age": 5} ', "[]", "<think></think>{}"):
        assert not door.accepts(bad, tool_format)


@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize("content", [{}, {"type": "array", "items": {"enum": ["T", 1]}}])
def test_content_that_begins_as_a_call_does_is_let_through_beside_calls(
    door: Door, tool_format: str, content: dict[str, Any]
) -> None:
    for good in ('["T", 1]', "[1]", "[]"):
        assert door.accepts(good, tool_format, content)
        assert read(good, tool_format) == (good, [])
    for name, output in ONE_CALL + TWO_CALLS:
        assert tool_format not in (name, "auto") or door.accepts(output, tool_format, content)


def test_any_object_or_calls_of_many_tools_can_be_compiled(plain: Tokenizer, libraries: dict[int, LLTokenizer]) -> None:
    tools = [Tool(type="function", function=FunctionDefinition(name=f"f{n}", parameters=CITY)) for n in range(40)]
    content = inference_pb2.Constraint(json_object=True)
    tag = content_or_calls("f", content, tools, "auto", in_parallel=True).structural_tag
    matcher = grammar.new_matcher(Constraint(ConstraintKind.STRUCTURAL_TAG, tag), libraries[id(plain)])
    token_ids = plain.encode('{"a": [1]}', add_special_tokens=False).ids
    assert all(matcher.consume_token(token_id) for token_id in token_ids)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000])
def test_schema_that_is_no_object_is_refused_by_name(text: str) -> None:
    with pytest.raises(ApiError, match="guided_json: must be a JSON object"):
        content_or_calls("guided_json", inference_pb2.Constraint(json_schema=text), TOOLS, "auto", in_parallel=True)
