"""What an output must match, and the grammar that says so, in the grammar library's own language."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from llguidance import LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from kvern.engine import structural_tag
from kvern.engine.json_schema import json_expression, json_object_in

_ALL_TOKENS = '\n%llguidance {"no_forcing": true}\n'
"""Allow every token that can go on to a match. By default the library allows only the tokenizer's own way of writing
what is sure to come, and takes a special token's name in it for that token."""


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
            return structural_tag.to_lark(constraint.text, tokenizer) + _ALL_TOKENS
        return _WRITERS[constraint.kind](constraint.text) + _ALL_TOKENS
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _json_schema(text: str) -> str:
    return f"start: {json_expression(json_object_in(text))}"


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
    return f"start: {json_expression({'type': 'object'})}"


_WRITERS: dict[ConstraintKind, Callable[[str], str]] = {
    ConstraintKind.JSON_SCHEMA: _json_schema,
    ConstraintKind.REGEX: _regex,
    ConstraintKind.GRAMMAR: _grammar,
    ConstraintKind.CHOICES: _choices,
    ConstraintKind.JSON_OBJECT: _any_object,
}
