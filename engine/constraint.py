"""What an output must match, and the grammar that says so, in the grammar library's own language."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from llguidance import LLTokenizer, StructTag, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

_ALL_TOKENS = '\n%llguidance {"no_forcing": true}\n'
"""Allow every token that can go on to a match. By default the library allows only the tokenizer's own way of writing
what is sure to come, and takes a special token's name in it for that token."""

_JSON_OPTIONS = {
    "whitespace_pattern": r"[ \n\t]{0,20}",  # without a bound, a model may write blanks until its tokens are used up
    "lenient": False,  # what is not supported is refused, not ignored
    "coerce_one_of": False,
}


class ConstraintKind(Enum):
    """Values are the names of the client's fields."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICES = "choices"
    JSON_OBJECT = "json_object"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a request asks of its output. Equal constraints have the same grammar."""

    kind: ConstraintKind
    text: str = ""
    """As the client wrote it; of choices, a JSON array of strings."""

    @property
    def field(self) -> str:
        return f"constraint.{self.kind.value}"


def to_lark(constraint: Constraint, tokenizer: LLTokenizer) -> str:
    """Return a constraint's grammar. Raises ValueError for what cannot be one; the library finds most faults itself.

    Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
    """
    try:
        if constraint.kind is ConstraintKind.STRUCTURAL_TAG:
            return _structural_tag(constraint.text, tokenizer) + _ALL_TOKENS
        return _WRITERS[constraint.kind](constraint.text) + _ALL_TOKENS
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _json_schema(text: str) -> str:
    return f"start: %json {_with_options(_schema_in(_json_object_in(text)))}"


def _regex(text: str) -> str:
    return f"start: /{regex_to_lark(text, '')}/"


def _grammar(text: str) -> str:
    """Take EBNF as llama.cpp's GBNF writes it (`root ::= ...`), or Lark (`start: ...`)."""
    try:
        return any_to_lark(text)
    except RecursionError:
        raise
    except Exception as error:  # the converter has no type of its own for most of what it raises
        raise ValueError(str(error)) from error


def _choices(text: str) -> str:
    return "start: " + " | ".join(json.dumps(value) for value in json.loads(text))


def _any_object(_: str) -> str:
    return f"start: %json {_with_options({'type': 'object'})}"


_WRITERS: dict[ConstraintKind, Callable[[str], str]] = {
    ConstraintKind.JSON_SCHEMA: _json_schema,
    ConstraintKind.REGEX: _regex,
    ConstraintKind.GRAMMAR: _grammar,
    ConstraintKind.CHOICES: _choices,
    ConstraintKind.JSON_OBJECT: _any_object,
}


def _structural_tag(text: str, tokenizer: LLTokenizer) -> str:
    """Read {"structures": [{"begin": str, "schema": object, "end": str}], "triggers": [str]}."""
    document = _json_object_in(text)
    structures, triggers = document.get("structures"), document.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise ValueError("structures must be an array of objects with begin, schema and end")
    if not isinstance(triggers, list) or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError("triggers must be an array of strings that are not empty")
    tags = [_tag(structure, triggers) for structure in structures]
    are_special = any(_is_special(trigger, tokenizer) for trigger in triggers)
    return StructTag.to_grammar(tags, assume_special=are_special)


def _tag(structure: Any, triggers: list[str]) -> StructTag:
    match structure:
        case {"begin": str(begin), "schema": dict(schema), "end": str(end)}:
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise ValueError(f"no trigger begins the tag {begin!r}")
            options = {"x-guidance": _JSON_OPTIONS}
            return StructTag(trigger=trigger, begin=begin, grammar={**_schema_in(schema), **options}, end=end)
    raise ValueError("a structure is an object with begin and end, strings, and schema, an object")


def _is_special(text: str, tokenizer: LLTokenizer) -> bool:
    token_ids = tokenizer.tokenize_str(text, parse_special=True)
    return len(token_ids) == 1 and tokenizer.is_special_token(token_ids[0])


def _with_options(schema: dict[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": _JSON_OPTIONS})


def _schema_in(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema unless it asks for what the library does wrong: it lets a whole number through that is excluded
    as a bound, where the other bound is less than 1 away. Bounds may stand apart and meet by reference, so all are
    looked at."""
    above, below = _numbers(schema, "exclusiveMinimum"), _numbers(schema, "exclusiveMaximum")
    highest, lowest = {*below, *_numbers(schema, "maximum")}, {*above, *_numbers(schema, "minimum")}
    for bound in above:
        if bound % 1 == 0 and any(bound < other < bound + 1 for other in highest):
            raise ValueError(f"exclusiveMinimum {bound} is not supported with a maximum below {bound + 1}")
    for bound in below:
        if bound % 1 == 0 and any(bound - 1 < other < bound for other in lowest):
            raise ValueError(f"exclusiveMaximum {bound} is not supported with a minimum above {bound - 1}")
    return schema


def _numbers(schema: Any, name: str) -> set[float]:
    """Return the values of a keyword, wherever in a schema it stands."""
    children = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    found = set().union(*(_numbers(child, name) for child in children))
    value = schema.get(name) if isinstance(schema, dict) else None
    return found | {value} if isinstance(value, int | float) and not isinstance(value, bool) else found


def _json_object_in(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value
