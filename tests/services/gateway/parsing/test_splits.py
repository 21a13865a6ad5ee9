"""What holds for every text, however it is cut: nothing depends on it, nothing is lost, little is held back."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from kvern.services.gateway.parsing import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Content,
    Reasoning,
    ToolCallBegins,
    open_parser,
)
from kvern.services.gateway.parsing.markers import END_TOKENS, MAX_SPACE
from tests.services.gateway.parsing.answers import TOOLS, Answer, parse

FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|im_end|>", "</s>", "```", "`", "<", "[", "{", "}", "]", '"', "\\", "\\u00", "\\n", ":", ",", ";", " ", "\n",
    "\t", "f", "add", "x", "é", "😀", "1", "-", ".5", "e", "null", "true", '"name": ', '"f"', '"g"', '"arguments": ',
    "{}", '"{', '{"name": "f", "arguments": ', '{"name": "f", "parameters": {"a": ', '{"name": "g", "arguments": {}}',
    '"arguments": {"a": [1, "}"]}', '"{\\"a\\": \\"', '\\"}"}', " " * 12,
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
LONGEST_MARKER = max(map(len, (*END_TOKENS, "<|python_tag|>")))


def pieces_of(text: str, cuts: set[int]) -> list[str]:
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@settings(max_examples=300)
@given(
    text=texts,
    cuts=st.sets(st.integers(1, 150)),
    tool_format=st.sampled_from(TOOL_FORMATS),
    reasoning_format=st.sampled_from(REASONING_FORMATS),
    begins_in_reasoning=st.booleans(),
)
def test_answer_does_not_depend_on_where_the_text_is_cut(
    text: str, cuts: set[int], tool_format: str, reasoning_format: str, begins_in_reasoning: bool
) -> None:
    whole, cut, single = (
        parse(
            pieces,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
            begins_in_reasoning=begins_in_reasoning,
        )
        for pieces in ([text], pieces_of(text, cuts), list(text))
    )
    assert whole == cut == single


@settings(max_examples=200)
@given(text=texts)
def test_answer_without_a_call_or_reasoning_is_the_text(text: str) -> None:
    answer = parse(text)
    if not answer.calls and "<think>" not in text:
        ended = next((text.removesuffix(token) for token in END_TOKENS if text.endswith(token)), text)
        assert answer == Answer(ended)


@settings(max_examples=60)
@given(
    arguments=st.dictionaries(st.text(), json_values, max_size=4),
    ascii_only=st.booleans(),
    indent=st.none() | st.just(2),
)
def test_calls_arguments_are_what_was_written(
    arguments: dict[str, object], ascii_only: bool, indent: int | None
) -> None:
    """B18."""
    text = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    as_string = json.dumps(text, ensure_ascii=ascii_only)
    for written in (
        '<tool_call>{"name": "f", "arguments": %s}</tool_call>',
        '{"arguments": %s, "name": "f"}',
        '[TOOL_CALLS] [{"name": "f", "arguments": %s}]',
    ):
        assert parse(written % text) == Answer(calls=[("f", text)])
        answer = parse(list(written % as_string))
        assert answer.content == ""
        assert [(name, json.loads(read)) for name, read in answer.calls] == [("f", arguments)]


@settings(max_examples=200)
@given(text=st.lists(st.sampled_from([*FRAGMENTS[:13], " ", "x", "\n", '{"a": 1}']), max_size=20).map("".join))
def test_text_that_opens_nothing_is_held_back_by_a_markers_length_at_most(text: str) -> None:
    """`<think>` apart, where held text is reasoning; whole opening markers are taken out, so that nothing opens."""
    for opening in ("<tool_call>", "<|python_tag|>", "[TOOL_CALLS]"):
        text = text.replace(opening, opening[:-1] + " ")
    parser = open_parser(tools=TOOLS, tool_format="auto", reasoning_format="none")
    num_shown = 0
    for num_read, char in enumerate(text, start=1):
        num_shown += sum(len(piece.text) for piece in parser.push(char) if isinstance(piece, (Content, Reasoning)))
        assert num_read - num_shown <= 2 * LONGEST_MARKER + MAX_SPACE


def test_long_answer_is_given_out_as_it_comes_and_leaves_nothing_behind() -> None:
    """Linear: what a push costs depends on the text that the parser holds, and that does not grow."""
    for head, text in (("", "x"), ("<think>", "x"), ('<tool_call>{"name": "f", "arguments": {"a": "', "}")):
        parser = open_parser(tools=TOOLS, tool_format="auto", reasoning_format="auto")
        parser.push(head + text)
        size = len(pickle.dumps(parser))
        for _ in range(100_000):
            (piece,) = parser.push(text)
            assert not isinstance(piece, ToolCallBegins)
            assert piece.text == text
        assert len(pickle.dumps(parser)) == size
