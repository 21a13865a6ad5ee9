"""Tool calls in each format's own form, and what only looks like one."""

from __future__ import annotations

import json

import pytest

from kvern.services.gateway.parsing import TOOL_FORMATS, Content, ToolCallArguments, ToolCallBegins, open_parser
from kvern.services.gateway.parsing.calls import MAX_HELD
from kvern.services.gateway.parsing.json_scanner import MAX_DEPTH
from kvern.services.gateway.parsing.markers import END_TOKENS, MAX_SPACE
from tests.services.gateway.parsing.answers import TOOLS, Answer, parse

F = '{"name": "f", "arguments": {"a": 1}}'
F_CALL = ("f", '{"a": 1}')


def hermes(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize("tool_format", ["auto", "hermes"])
def test_hermes_calls_with_content_before_and_after_are_found(tool_format: str) -> None:
    text = f"Let me see.\n{hermes(F)}\n{hermes(F)}\n\nDone.<|im_end|>"
    assert parse(text, tool_format=tool_format) == Answer("Let me see.Done.", "", [F_CALL, F_CALL])


def test_hermes_calls_back_to_back_without_whitespace_are_two() -> None:
    assert parse(f"<tool_call>{F}</tool_call><tool_call>{F}</tool_call>").calls == [F_CALL, F_CALL]


def test_hermes_closing_marker_missing_call_stands() -> None:
    assert parse(f"<tool_call>{F}\n<tool_call>{F}") == Answer(calls=[F_CALL, F_CALL])


def test_hermes_object_without_its_last_brace_call_stands() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>\nDone.'
    assert parse(text) == Answer("Done.", "", [F_CALL])


@pytest.mark.parametrize("tool_format", ["auto", "llama3"])
@pytest.mark.parametrize("opening", ["", "<|python_tag|>", " \n", "\n<|python_tag|> "])
@pytest.mark.parametrize(
    "form", ["{0}", "{0}; {1}", "{0};{1}", "{0}\n{1}", "[{0}, {1}]", "[{0}]", "[ {0} ,\n{1} ]\n", "{0}<|eom_id|>"]
)
def test_llama_calls_that_are_the_whole_answer_are_found(tool_format: str, opening: str, form: str) -> None:
    calls = ['{"name": "f", "parameters": {"a": 1}}', '{"type": "function", "name": "add", "parameters": {}}']
    wanted = [F_CALL, ("add", "{}")] if "{1}" in form else [F_CALL]
    text = opening + form.replace("{0}", calls[0]).replace("{1}", calls[1])
    assert parse(text, tool_format=tool_format) == Answer(calls=wanted)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (F + "; ", ""),
        (F + "]", "]"),
        (F + " \n\nDone.", "Done."),
        (F + "; Done.", "; Done."),
        (f"[{F} ", ""),
        (f"[{F} Done.", " Done."),
        (f"[{F}]Done.", "Done."),
    ],
)
def test_llama_calls_end_where_something_else_comes(text: str, content: str) -> None:
    assert parse(text) == Answer(content, "", [F_CALL])


def test_llama_call_after_more_whitespace_than_a_template_writes_is_content() -> None:
    assert parse(" " * MAX_SPACE + F) == Answer(calls=[F_CALL])
    assert parse(" " * (MAX_SPACE + 1) + F) == Answer(" " * (MAX_SPACE + 1) + F)


@pytest.mark.parametrize("tool_format", ["auto", "mistral"])
@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "add", "arguments": {}, "id": "x"}]</s>',
        '[TOOL_CALLS][{"name":"f","arguments":{"a": 1}},{"arguments":{},"name":"add"}]',
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{}',
        '[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]a1B2c3D4f[ARGS]{}</s>',
        '[TOOL_CALLS]f{"a": 1}\n[TOOL_CALLS] add {}',
    ],
)
def test_mistral_calls_of_both_forms_are_found(tool_format: str, text: str) -> None:
    assert parse(text, tool_format=tool_format) == Answer(calls=[F_CALL, ("add", "{}")])
    assert parse("See: " + text, tool_format=tool_format) == Answer("See:", "", [F_CALL, ("add", "{}")])


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('"arguments": {}', "{}"),
        ('"arguments": null', "{}"),
        ('"arguments": ""', "{}"),
        ('"type": "function", "id": 5', "{}"),
        ('"arguments": {"a": {"b": [{}, [1.5e3, -0, true, null]]}}', '{"a": {"b": [{}, [1.5e3, -0, true, null]]}}'),
        (r'"arguments": {"a": "}\"{]\\"}', r'{"a": "}\"{]\\"}'),
        (r'"arguments": {"a": "é\u00e9\ud83d\ude00😀"}', r'{"a": "é\u00e9\ud83d\ude00😀"}'),
        ('"arguments": {"a": "</tool_call><tool_call>"}', '{"a": "</tool_call><tool_call>"}'),
        ('"arguments": {"a": "<think>no</think>[TOOL_CALLS]"}', '{"a": "<think>no</think>[TOOL_CALLS]"}'),
        (r'"arguments": "{\"a\": \"\u00e9\\n\\\"\ud83d\ude00\"}"', r'{"a": "é\n\"\ud83d\ude00"}'),
        (r'"arguments": " {\"a\": 1}\n"', '{"a": 1}'),
        ('"arguments": {"code": "a\n\tb"}', r'{"code": "a\n\tb"}'),
        ('"arguments": {\n\t"a":\r\n1\n}', '{\n\t"a":\r\n1\n}'),
        ('"arguments": {"a": "x"}, "why": ["not"]', '{"a": "x"}'),
    ],
)
def test_arguments_in_every_form_are_the_models_own_json(arguments: str, wanted: str) -> None:
    """B18: as an object and as a string."""
    for text in (hermes(f'{{"name": "f", {arguments}}}'), f'{{"name": "f", {arguments}}}'):
        assert parse(text) == Answer(calls=[("f", wanted)])
    assert isinstance(json.loads(wanted), dict)


@pytest.mark.parametrize(
    "text",
    [
        "a < b",
        "<",
        "<tool_call>",
        "Use <tool_call> and </tool_call>, or [TOOL_CALLS] and <|python_tag|>.",
        hermes('{"name": "g", "arguments": {}}'),
        hermes('{"name": ["f"], "arguments": {}}'),
        hermes('{"name": "f", "arguments": 5}'),
        hermes('{"name": "f", "arguments": ["a"]}'),
        hermes('{"name": "f", "arguments": "Paris"}'),
        hermes('{"name": "f", "name": "f"}'),
        hermes('{"name": "f", "colour": "red"}'),
        hermes('{"arguments": {"a": 1}}'),
        hermes("{}"),
        hermes('"f"'),
        hermes('{"name" "f"}'),
        hermes('{"name": "f\n"}'),
        '\n  {"name": "g", "parameters": {"a": 1}}',
        '{"name": "g"}; ' + F,
        f"It is {F}",
        f"[1, {F}]",
        "[]",
        "  [ ",
        '{"city": "Paris"}',
        '<|python_tag|>print("hello")',
        "[TOOL_CALLS] []",
        '[TOOL_CALLS] [{"name": "g", "arguments": {}}]',
        "[TOOL_CALLS]g[ARGS]{}",
        "[TOOL_CALLS]f[WHAT]{}",
        "[TOOL_CALLS]f or " + "x" * 500 + "{}",
        f"```json\n{hermes(F)}\n```\n",
        "Between <|im_end|> and <|eot_id|> there is text",
    ],
)
def test_text_that_is_no_call_stays_content_character_for_character(text: str) -> None:
    assert parse(text) == Answer(text)
    assert parse(list(text)) == Answer(text)


def test_call_cut_off_before_its_arguments_is_content() -> None:
    text = hermes(F)
    for end in range(text.index('{"a"') + 1):
        assert parse(text[:end]) == Answer(text[:end])


def test_call_cut_off_after_its_beginning_is_given_as_far_as_it_came() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": 5}'
    start, stop = text.index('{"a"'), text.index(', "id"')
    for end in range(start + 1, len(text) + 1):
        assert parse(text[:end]) == Answer(calls=[("f", text[start : min(end, stop)])])


def test_call_after_a_code_block_is_found() -> None:
    answer = parse(f"```\n{hermes(F)}\n```\n{hermes(F)}")
    assert answer == Answer(f"```\n{hermes(F)}\n```", "", [F_CALL])


def test_broken_json_after_a_calls_beginning_is_content_from_there() -> None:
    answer = parse('<tool_call>{"name": "f", "arguments": {"a": 1,, "b": 2}}</tool_call>')
    assert answer == Answer(', "b": 2}}</tool_call>', "", [("f", '{"a": 1,')])


def test_unknown_name_after_a_call_is_content_the_call_stands() -> None:
    unknown = '{"name": "g", "arguments": {}}'
    assert parse(f"[TOOL_CALLS] [{F}, {unknown}]") == Answer(f", {unknown}]", "", [F_CALL])
    assert parse(f"{hermes(F)} {hermes(unknown)}{hermes(F)}").calls == [F_CALL, F_CALL]


@pytest.mark.parametrize(("opening", "closing"), [('{"a":', "}"), ("[", "]")])
def test_arguments_nested_deeper_than_the_bound_are_content_from_there(opening: str, closing: str) -> None:
    text = '{"a": ' + opening * (MAX_DEPTH - 1) + "1" + closing * (MAX_DEPTH - 1) + "}"
    assert parse(hermes(f'{{"name": "f", "arguments": {text}}}')) == Answer(calls=[("f", text)])
    begins, ends = '{"a": ' + opening * (MAX_DEPTH - 1), closing * MAX_DEPTH + "}}</tool_call>"
    deeper = '<tool_call>{"name": "f", "arguments": ' + begins + opening + "1" + ends
    assert parse(deeper) == Answer(opening + "1" + ends, "", [("f", begins)])


def test_head_longer_than_the_bound_is_content() -> None:
    text = '<tool_call>{"arguments": {"a": "%s"}, "name": "f"}</tool_call>'
    assert parse(text % ("x" * (MAX_HELD - 100))).calls == [("f", '{"a": "%s"}' % ("x" * (MAX_HELD - 100)))]
    assert parse(text % ("x" * MAX_HELD)) == Answer(text % ("x" * MAX_HELD))


def test_mistral_head_longer_than_the_bound_is_given_out() -> None:
    parser = open_parser(tools=TOOLS, tool_format="mistral", reasoning_format="none")
    text = "[TOOL_CALLS]f or " + "x" * 300
    assert parser.push(text) == [Content(text)]


def test_arguments_that_come_in_pieces_are_given_at_once() -> None:
    parser = open_parser(tools=TOOLS, tool_format="auto", reasoning_format="auto")
    assert parser.push('I see.\n<tool_call>\n{"name": "f", ') == [Content("I see.")]
    assert parser.push('"arguments": {"a"') == [ToolCallBegins(0, "f"), ToolCallArguments(0, '{"a"')]
    assert parser.push(': "<') == [ToolCallArguments(0, ': "')]
    assert parser.push('x"}') == [ToolCallArguments(0, '<x"}')]
    assert parser.push("}\n</tool_call>") == []
    assert parser.finish() == []


@pytest.mark.parametrize("token", END_TOKENS)
def test_control_token_at_the_end_is_taken_away_where_tools_are_offered(token: str) -> None:
    assert parse(f"Hello.{token}") == Answer("Hello.")
    assert parse(list(f"Hello.{token}")) == Answer("Hello.")
    assert parse(f"Hello.{token}", tools=()) == Answer(f"Hello.{token}")
    assert parse(f"Hello.{token}", tool_format="none") == Answer(f"Hello.{token}")
    assert parse(f"{hermes(F)}{token}") == Answer(calls=[F_CALL])


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_only_the_formats_own_calls_are_found(tool_format: str) -> None:
    texts = {"hermes": hermes(F), "llama3": F, "mistral": f"[TOOL_CALLS][{F}]"}
    for own_format, text in texts.items():
        is_found = tool_format in ("auto", own_format)
        assert parse(text, tool_format=tool_format) == (Answer(calls=[F_CALL]) if is_found else Answer(text))


def test_no_tools_and_no_reasoning_gives_every_text_as_it_is() -> None:
    parser = open_parser(tools=(), tool_format="auto", reasoning_format="none", begins_in_reasoning=True)
    assert parser.push("<think>") == [Content("<think>")]
    assert parser.push("<") == [Content("<")]
    assert parser.push("") == parser.finish() == []


def test_format_that_is_none_is_refused_naming_those_there_are() -> None:
    with pytest.raises(ValueError, match="tool_format 'xml' is none of auto, hermes, llama3, mistral, none"):
        open_parser(tools=(), tool_format="xml", reasoning_format="none")
    with pytest.raises(ValueError, match="reasoning_format 'deep' is none of auto, think, none"):
        open_parser(tools=(), tool_format="none", reasoning_format="deep")
