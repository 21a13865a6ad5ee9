"""Grammars on a vocabulary small enough to say what must be allowed."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import jsonschema
import numpy as np
import pytest

from kvern.engine.constraint import Constraint, ConstraintKind
from kvern.engine.errors import RequestRefused
from kvern.engine.grammar import GrammarCompiler, MatcherState

from .small_vocabulary import EOS, TOKENS, make_tokenizer

VOCAB_SIZE = 96
"""Models have rows for tokens that the tokenizer does not know."""

OTHER_EOS = TOKENS.index("<pad>")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(make_tokenizer().to_str(), VOCAB_SIZE, {EOS, OTHER_EOS})


def start(compiler: GrammarCompiler, kind: ConstraintKind, text: str) -> MatcherState:
    return compiler.compile(Constraint(kind, text)).result().start()


def allowed(state: MatcherState, *, may_end: bool = True) -> set[str]:
    """Return what may come next, a space for the byte-level alphabet's, <end> for each of the end tokens at once."""
    row = np.full(-(-VOCAB_SIZE // 32), -1, dtype=np.int32)
    state.fill(row, may_end=may_end)
    token_ids = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
    assert (EOS in token_ids) == (OTHER_EOS in token_ids)
    tokens = {TOKENS[token_id].replace("Ġ", " ") for token_id in token_ids - {EOS, OTHER_EOS}}
    return tokens | {"<end>"} if EOS in token_ids else tokens


def feed(state: MatcherState, text: str) -> MatcherState:
    for token_id in make_tokenizer().encode(text, add_special_tokens=False).ids:
        assert state.advance(token_id), state.error
    return state


def accepts(state: MatcherState, text: str) -> bool:
    """Whether the tokens of a text, one after another, are allowed, and it may end there."""
    token_ids = make_tokenizer().encode(text, add_special_tokens=False).ids
    return all(state.advance(token_id) for token_id in token_ids) and "<end>" in allowed(state)


def start_format(compiler: GrammarCompiler, form: object) -> MatcherState:
    tag = json.dumps({"type": "structural_tag", "format": form})
    return start(compiler, ConstraintKind.STRUCTURAL_TAG, tag)


def text(value: str) -> dict[str, object]:
    return {"type": "const_string", "value": value}


def tags(**fields: object) -> dict[str, object]:
    """Numbers in brackets."""
    schema = {"type": "json_schema", "json_schema": {"type": "integer"}}
    tag = {"type": "tag", "begin": "(", "content": schema, "end": ")"}
    return {"type": "tags_with_separator", "tags": [tag], **fields}


def test_regex_allows_exactly_the_tokens_that_can_go_on(compiler: GrammarCompiler) -> None:
    state = start(compiler, ConstraintKind.REGEX, r"(ab|true?)\d{1,2}x*")
    assert allowed(state) == {"a", "ab", "t", "tr", "tru", "true"}
    assert allowed(feed(state, "tru")) == {"e", *"0123456789"}
    assert allowed(feed(state, "7")) == {*"0123456789", "x", "<end>"}
    assert allowed(feed(state, "0")) == {"x", "<end>"}


def test_end_tokens_are_allowed_exactly_where_a_choice_is_complete(compiler: GrammarCompiler) -> None:
    state = start(compiler, ConstraintKind.CHOICES, json.dumps(["a", "abc", "true", "ä"]))
    assert allowed(state) == {"a", "ab", "t", "tr", "tru", "true", "Ã"}
    assert allowed(feed(state, "a")) == {"b", "<end>"}
    assert allowed(feed(state, "b")) == {"c"}
    assert allowed(feed(state, "c")) == {"<end>"}


def test_without_may_end_a_complete_output_goes_on_and_ends_only_where_nothing_else_may_follow(
    compiler: GrammarCompiler,
) -> None:
    state = feed(start(compiler, ConstraintKind.CHOICES, '["a", "ab"]'), "a")
    assert allowed(state) == {"b", "<end>"}
    assert allowed(state, may_end=False) == {"b"}
    assert allowed(feed(state, "b"), may_end=False) == {"<end>"}


def test_choices_are_taken_as_written(compiler: GrammarCompiler) -> None:
    choices = ['"', "\\", "a|ab", "(a)*", "ä", "/a/", "a b", "<s>"]
    for choice in choices[:-1]:
        assert accepts(start(compiler, ConstraintKind.CHOICES, json.dumps(choices)), choice)
    assert not accepts(start(compiler, ConstraintKind.CHOICES, json.dumps(choices)), "aa")


@pytest.mark.parametrize(
    "text",
    [
        'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"',
        'start: expr\nexpr: term ("+" term)*\nterm: /[0-9]+/ | "(" expr ")"',
    ],
    ids=["gbnf", "lark"],
)
def test_grammar_with_recursion_accepts_its_language(compiler: GrammarCompiler, text: str) -> None:
    for good in ("1", "1+22", "((3))+(4+5)"):
        assert accepts(start(compiler, ConstraintKind.GRAMMAR, text), good)
    for bad in ("", "1+", "(1", "1)", "a"):
        assert not accepts(start(compiler, ConstraintKind.GRAMMAR, text), bad)


def test_json_object_accepts_objects_only(compiler: GrammarCompiler) -> None:
    for good in ("{}", '{"a": [1, {"b": true}]}', '{"ä":-0.5}'):
        assert accepts(start(compiler, ConstraintKind.JSON_OBJECT, ""), good)
    assert allowed(start(compiler, ConstraintKind.JSON_OBJECT, "")) == {"{"}


def test_json_schema_bounds_blanks_between_values(compiler: GrammarCompiler) -> None:
    schema = json.dumps({"type": "array", "items": {"type": "integer"}})
    assert accepts(start(compiler, ConstraintKind.JSON_SCHEMA, schema), "[1, " + " " * 10 + "2]")
    state = feed(start(compiler, ConstraintKind.JSON_SCHEMA, schema), "[" + " " * 20)
    assert " " not in allowed(state)


def test_name_of_a_special_token_in_a_schema_is_text_not_the_token(compiler: GrammarCompiler) -> None:
    state = feed(start(compiler, ConstraintKind.JSON_SCHEMA, '{"const": "</s>"}'), '"')
    assert allowed(state) == {"<"}


def test_structural_tag_leaves_text_free_and_constrains_its_insides(compiler: GrammarCompiler) -> None:
    tag = {
        "structures": [{"begin": "<f=a>", "schema": {"type": "integer", "minimum": 10}, "end": "</f>"}],
        "triggers": ["<f"],
    }
    state = feed(start(compiler, ConstraintKind.STRUCTURAL_TAG, json.dumps(tag)), "ab c<g")
    assert allowed(state) >= {"a", "<", "true", "<end>"}
    assert allowed(feed(state, "<f")) == {"="}
    assert allowed(feed(state, "=a>")) == {*"123456789"}
    assert allowed(feed(state, "12")) == {*"0123456789", "<"}
    assert allowed(feed(state, "</f>")) >= {"a", "<", "true", "<end>"}


def test_format_of_the_whole_output_accepts_what_its_parts_make(compiler: GrammarCompiler) -> None:
    calls = tags(separator=",", at_least_one=True)
    parts = {"type": "sequence", "elements": [text("a b"), {"type": "or", "elements": [text(""), text("c")]}]}
    form = {"type": "or", "elements": [parts, {"type": "json_schema", "json_schema": {"type": "object"}}, calls]}
    for good in ("a b", "a bc", "{}", '{"a":1}', "(1)", "(1),(23),(4)"):
        assert accepts(start_format(compiler, form), good)
    for bad in ("", "a", "c", "[]", "(1),", "(1)(2)", "(a)", "a b{}", "{}(1)"):
        assert not accepts(start_format(compiler, form), bad)


@pytest.mark.parametrize(
    ("flags", "accepted"),
    [
        ({}, ["", "(1)", "(1)(2)"]),
        ({"at_least_one": True}, ["(1)", "(1)(2)"]),
        ({"stop_after_first": True}, ["", "(1)"]),
        ({"at_least_one": True, "stop_after_first": True}, ["(1)"]),
    ],
)
def test_tags_of_a_format_come_as_often_as_it_says(
    compiler: GrammarCompiler, flags: dict[str, bool], accepted: list[str]
) -> None:
    form = {"type": "sequence", "elements": [text("t"), tags(separator="", **flags)]}
    outputs = ["", "(1)", "(1)(2)"]
    assert [output for output in outputs if accepts(start_format(compiler, form), "t" + output)] == accepted


def test_name_of_a_special_token_in_a_format_is_the_token(compiler: GrammarCompiler) -> None:
    assert allowed(start_format(compiler, text("<s>"))) == {"<s>"}
    assert allowed(start_format(compiler, text("<s>a"))) == {"<"}


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ([], "an object with a type"),
        ({"type": ["or"]}, "an object with a type"),
        ({"type": "any_text"}, "any_text are not supported"),
        ({"type": "or", "elements": []}, "needs elements"),
        ({"type": "sequence"}, "needs elements"),
        ({"type": "const_string", "value": 1}, "needs value"),
        ({"type": "json_schema", "json_schema": {}, "style": "xml"}, "style is not supported"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, 'Unimplemented keys: ["not"]'),
        ({"type": "json_schema", "json_schema": {"exclusiveMinimum": 2, "maximum": 2.5}}, "exclusiveMinimum 2"),
        ({"type": "tags_with_separator", "tags": [{"type": "or", "elements": []}], "separator": ""}, "of type tag"),
        (tags(separator="", at_least_one=1), "booleans"),
    ],
)
def test_format_that_cannot_be_done_is_refused_with_the_reason(
    compiler: GrammarCompiler, form: object, reason: str
) -> None:
    with pytest.raises(RequestRefused, match=re.escape(reason)) as refused:
        start_format(compiler, form)
    assert refused.value.field == "constraint.structural_tag"


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (ConstraintKind.JSON_SCHEMA, '{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
        (ConstraintKind.JSON_SCHEMA, '{"uniqueItems": true, "type": "array"}', 'Unimplemented keys: ["uniqueItems"]'),
        (ConstraintKind.JSON_SCHEMA, '{"type": "integer", "minimum": 3, "maximum": 2}', "Unsatisfiable"),
        (ConstraintKind.JSON_SCHEMA, '{"not": {}, "x-guidance": {"lenient": true}}', 'Unimplemented keys: ["not"]'),
        (ConstraintKind.JSON_SCHEMA, '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
        (ConstraintKind.JSON_SCHEMA, '{"$ref": "http://example.org/schema"}', "example.org"),
        (ConstraintKind.JSON_SCHEMA, '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
        (ConstraintKind.JSON_SCHEMA, "[]", "must be a JSON object"),
        (ConstraintKind.JSON_SCHEMA, "{", "cannot be compiled: Expecting"),
        (ConstraintKind.JSON_SCHEMA, '{"exclusiveMinimum": 2, "maximum": 2.5}', "exclusiveMinimum 2"),
        (ConstraintKind.JSON_SCHEMA, '{"items": [{"exclusiveMaximum": 0}, {"minimum": -0.5}]}', "exclusiveMaximum 0"),
        (ConstraintKind.JSON_SCHEMA, '{"items":' * 100_000 + "{}" + "}" * 100_000, "nested too deeply"),
        (ConstraintKind.JSON_SCHEMA, '{"items":' * 500 + "{}" + "}" * 500, "nested too deeply"),
        (ConstraintKind.JSON_SCHEMA, '{"items":' * 200 + "{}" + "}" * 200, "recursion limit"),
        (ConstraintKind.REGEX, "(a", "unclosed group"),
        (ConstraintKind.REGEX, r"(a)\1", "backreferences"),
        (ConstraintKind.GRAMMAR, "root ::= missing", "'missing' not found"),
        (ConstraintKind.GRAMMAR, "start: missing", 'unknown name: "missing"'),
        (ConstraintKind.GRAMMAR, "start: " + "(" * 10_000 + '"a"' + ")" * 10_000, "too deeply nested"),
        (ConstraintKind.GRAMMAR, "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000, "nested too deeply"),
        (ConstraintKind.STRUCTURAL_TAG, "{}", "structures"),
        (ConstraintKind.STRUCTURAL_TAG, '{"type": "structural_tag", "format": {}, "triggers": []}', "nothing else"),
        (ConstraintKind.STRUCTURAL_TAG, '{"structures": [{"begin": "<a>"}], "triggers": ["<"]}', "begin and end"),
        (
            ConstraintKind.STRUCTURAL_TAG,
            '{"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}',
            "no trigger",
        ),
    ],
)
def test_constraint_that_cannot_be_done_is_refused_by_name_with_the_reason(
    compiler: GrammarCompiler, kind: ConstraintKind, text: str, reason: str
) -> None:
    with pytest.raises(RequestRefused) as refused:
        compiler.compile(Constraint(kind, text)).result()
    assert refused.value.field == f"constraint.{kind.value}"
    assert reason in str(refused.value)
    assert "x-guidance" not in str(refused.value)


def test_token_that_is_not_allowed_ends_a_state_with_a_reason(compiler: GrammarCompiler) -> None:
    state = start(compiler, ConstraintKind.REGEX, "ab")
    assert not state.advance(TOKENS.index("c"))
    assert "doesn't satisfy the grammar" in state.error
    assert allowed(state) == {"<end>"}
    assert not state.advance(EOS)


def test_states_of_one_grammar_go_their_own_ways(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(Constraint(ConstraintKind.REGEX, "a[xy]|b[z]")).result()
    first, second = grammar.start(), grammar.start()
    feed(first, "a")
    feed(second, "b")
    assert (allowed(first), allowed(second), allowed(grammar.start())) == ({"x", "y"}, {"z"}, {"a", "b"})


def test_equal_constraints_are_compiled_once_and_the_longest_unused_is_forgotten() -> None:
    compiler = GrammarCompiler(make_tokenizer().to_str(), VOCAB_SIZE, {EOS}, max_entries=2)
    first, second, third = (Constraint(ConstraintKind.REGEX, text) for text in ("a", "b", "c"))
    compiled = compiler.compile(first)
    kept = compiler.compile(second)
    assert compiler.compile(Constraint(ConstraintKind.REGEX, "a")) is compiled
    compiler.compile(third)
    assert compiler.compile(first) is compiled
    assert compiler.compile(second) is not kept


def test_tokenizer_that_the_library_cannot_read_raises() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        GrammarCompiler("{}", VOCAB_SIZE, {EOS})


@pytest.mark.parametrize("low", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("high", ["maximum", "exclusiveMaximum"])
def test_numbers_at_and_around_their_bounds_are_allowed_as_jsonschema_says(
    compiler: GrammarCompiler, low: str, high: str
) -> None:
    """All that is let through is valid, or the schema is refused; what is valid and plainly written is let through."""
    bounds = (-10, -1.5, -1, -0.25, 0, 0.5, 1, 2.5, 3)
    for least, most in ((least, most) for least in bounds for most in bounds if least < most):
        schema = {"type": "number", low: least, high: most}
        constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
        compiled = compiler.compile(constraint)
        if compiled.exception() is not None:
            assert "not supported with" in str(compiled.exception())
            continue
        numbers = {bound + step for bound in (least, most, 0) for step in (-1, -0.5, -0.01, 0, 0.01, 0.5, 1)}
        for text in {form for number in numbers for form in (f"{number:g}", f"{number:.2f}", f"-{abs(number):g}")}:
            is_valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
            assert accepts(compiled.result().start(), text) <= is_valid, (schema, text)


_DEEP = """
import threading
from kvern.engine.constraint import Constraint, ConstraintKind
from kvern.engine.grammar import GrammarCompiler
from tests.engine.small_vocabulary import EOS, make_tokenizer

threading.stack_size(512 * 1024)
rules = [f'a{number}: "(" a{number + 1} ")"' for number in range(1000)]
text = "\\n".join(["start: a0", *rules, 'a1000: "x"'])
compiler = GrammarCompiler(make_tokenizer().to_str(), 96, {EOS})
compiler.compile(Constraint(ConstraintKind.GRAMMAR, text)).result()
compiler.close()
"""


def test_deep_grammar_is_compiled_however_small_the_stacks_of_other_threads_are() -> None:
    """In a process of its own, which an overflow ends."""
    subprocess.run([sys.executable, "-c", _DEEP], check=True)
