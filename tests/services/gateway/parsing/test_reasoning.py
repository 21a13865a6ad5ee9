"""Reasoning apart from the answer."""

from __future__ import annotations

import pytest

from kvern.services.gateway.parsing import Content, Reasoning, open_parser
from tests.services.gateway.parsing.answers import Answer, parse

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("tools", [(), ("f",)])
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<think>\nwhy\n</think>\n\nbecause", Answer("because", "why")),
        ("\n<think>why</think>because", Answer("because", "why")),
        ("Well.\n<think>why</think> because", Answer("Well.because", "why")),
        ("<think>\n\n</think>\n\nHello", Answer("Hello")),
        ("<think>never closed\n", Answer("", "never closed\n")),
        ("<think>cut off </thi", Answer("", "cut off </thi")),
        ("<thi", Answer("<thi")),
        ("no </think> here", Answer("no </think> here")),
        ("Write `<think>` first.", Answer("Write `<think>` first.")),
        ("```\n<think>\n```\nabove", Answer("```\n<think>\n```\nabove")),
        ("<think>a</think>b <think>c</think>", Answer("b <think>c</think>", "a")),
        ("<think>if a < b\n\n  `x`</think>c", Answer("c", "if a < b\n\n  `x`")),
    ],
)
def test_reasoning_that_the_model_opens_is_set_apart(tools: tuple[str, ...], text: str, wanted: Answer) -> None:
    assert parse(text, tools=tools) == wanted
    assert parse(list(text), tools=tools) == wanted


@pytest.mark.parametrize(
    ("reasoning_format", "begins_in_reasoning"), [("think", False), ("think", True), ("auto", True)]
)
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("\nwhy\n</think>\n\nbecause", Answer("because", "why")),
        ("<think>\nwhy\n</think>\n\nbecause", Answer("because", "why")),
        ("</think>because", Answer("because")),
        ("never closed", Answer("", "never closed")),
        ("a <think> b</think>c <think>d", Answer("c <think>d", "a <think> b")),
        ("<thi", Answer("", "<thi")),
        ("", Answer()),
    ],
)
def test_reasoning_that_was_open_already_ends_with_its_marker(
    reasoning_format: str, begins_in_reasoning: bool, text: str, wanted: Answer
) -> None:
    for texts in (text, list(text)):
        answer = parse(texts, reasoning_format=reasoning_format, begins_in_reasoning=begins_in_reasoning)
        assert answer == wanted


def test_reasoning_without_a_format_is_content() -> None:
    text = "<think>why</think>because"
    assert parse(text, reasoning_format="none", begins_in_reasoning=True) == Answer(text)


@pytest.mark.parametrize("call", [CALL, '{"name": "f"}', '[{"name": "f"}]', "[TOOL_CALLS]f[ARGS]{}"])
def test_call_after_reasoning_is_found_one_within_is_reasoning(call: str) -> None:
    assert parse(f"<think>\n{call}\n</think>\n\n{call}<|im_end|>") == Answer("", call, [("f", "{}")])
    assert parse(f"{call}</think>{call}", begins_in_reasoning=True) == Answer("", call, [("f", "{}")])


def test_reasoning_is_given_as_it_comes() -> None:
    parser = open_parser(tools=(), tool_format="none", reasoning_format="auto")
    assert parser.push("<think>\nwhy") == [Reasoning("why")]
    assert parser.push(" not\n") == [Reasoning(" not")]
    assert parser.push("</think>\n\nBecause.") == [Content("Because.")]
    assert parser.push(" < 3") == [Content(" < 3")]


def test_long_whitespace_before_a_marker_is_not_held_back() -> None:
    parser = open_parser(tools=(), tool_format="none", reasoning_format="think")
    assert parser.push("why" + "\n" * 100) == [Reasoning("why" + "\n" * 92)]
    assert parser.push("</think>\n") == []
