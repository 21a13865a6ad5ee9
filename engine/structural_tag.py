"""Structural tags: outputs of several parts, of which some are held to a schema."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLTokenizer, StructTag

from kvern.engine.json_schema import JSON_OPTIONS, checked, json_expression, json_object_in

_FIELDS = {
    "const_string": {"value"},
    "json_schema": {"json_schema"},
    "sequence": {"elements"},
    "or": {"elements"},
    "tag": {"begin", "content", "end"},
    "tags_with_separator": {"tags", "separator", "at_least_one", "stop_after_first"},
}
"""The types of formats, and what each has beside its type."""


def to_lark(text: str, tokenizer: LLTokenizer) -> str:
    """Return the grammar of one of the two forms. Raises ValueError for what is neither.

    {"structures": [{"begin": str, "schema": object, "end": str}], "triggers": [str]}: tags in free text.
    {"type": "structural_tag", "format": object}: a format of the whole output, as xgrammar has them, where a string
    that is a special token's name stands for the token. Source: https://xgrammar.mlc.ai/docs.
    """
    document = json_object_in(text)
    if "format" not in document:
        return _in_free_text(document, tokenizer)
    if document.keys() != {"type", "format"} or document["type"] != "structural_tag":
        raise ValueError("beside format there is type, which is structural_tag, and nothing else")
    return _FormatWriter(tokenizer).write(document["format"])


class _FormatWriter:
    """Writes a format as a grammar, with a rule for each list of tags."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules: list[str] = []

    def write(self, form: object) -> str:
        start = self._expression(form)
        return "\n".join([f"start: {start}", *self._rules])

    def _expression(self, form: object) -> str:
        kind, fields = _kind_of(form)
        match kind, fields:
            case "const_string", {"value": str(value)}:
                return self._text(value)
            case "json_schema", {"json_schema": dict(schema)}:
                return json_expression(schema)
            case "sequence", {"elements": [_, *_] as elements}:
                return f"({' '.join(map(self._expression, elements))})"
            case "or", {"elements": [_, *_] as elements}:
                return f"({' | '.join(map(self._expression, elements))})"
            case "tag", {"begin": str(begin), "content": content, "end": str(end)}:
                return f"({self._text(begin)} {self._expression(content)} {self._text(end)})"
            case "tags_with_separator", {"tags": [_, *_] as tags, "separator": str(separator)}:
                return self._tags(tags, separator, fields)
        raise ValueError(f"a format of type {kind} needs {', '.join(sorted(_FIELDS[kind]))} of the right types")

    def _tags(self, tags: list[Any], separator: str, fields: dict[str, Any]) -> str:
        if any(_kind_of(tag)[0] != "tag" for tag in tags):
            raise ValueError("tags must be formats of type tag")
        at_least_one, stop_after_first = fields.get("at_least_one", False), fields.get("stop_after_first", False)
        if not isinstance(at_least_one, bool) or not isinstance(stop_after_first, bool):
            raise ValueError("at_least_one and stop_after_first must be booleans")
        # A rule, so that what stands twice is compiled once.
        expression = " | ".join(map(self._expression, tags))
        name = f"tags_{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        found = name if stop_after_first else f"{name} ({self._text(separator)} {name})*"
        return f"({found})" if at_least_one else f"({found})?"

    def _text(self, value: str) -> str:
        token_id = _special_token(value, self._tokenizer)
        return json.dumps(value) if token_id is None else f"<[{token_id}]>"


def _kind_of(form: object) -> tuple[str, dict[str, Any]]:
    """Return a format's type and what else it has."""
    if not isinstance(form, dict) or not isinstance(kind := form.get("type"), str):
        raise ValueError("a format must be an object with a type")
    if kind not in _FIELDS:
        raise ValueError(f"formats of type {kind} are not supported")
    fields = {name: value for name, value in form.items() if name != "type"}
    if unknown := fields.keys() - _FIELDS[kind]:
        raise ValueError(f"{min(unknown)} is not supported in a format of type {kind}")
    return kind, fields


def _in_free_text(document: dict[str, Any], tokenizer: LLTokenizer) -> str:
    """Read {"structures": [{"begin": str, "schema": object, "end": str}], "triggers": [str]}."""
    structures, triggers = document.get("structures"), document.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise ValueError("structures must be an array of objects with begin, schema and end")
    if not isinstance(triggers, list) or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError("triggers must be an array of strings that are not empty")
    tags = [_tag(structure, triggers) for structure in structures]
    are_special = any(_special_token(trigger, tokenizer) is not None for trigger in triggers)
    return StructTag.to_grammar(tags, assume_special=are_special)


def _tag(structure: Any, triggers: list[str]) -> StructTag:
    match structure:
        case {"begin": str(begin), "schema": dict(schema), "end": str(end)}:
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise ValueError(f"no trigger begins the tag {begin!r}")
            options = {"x-guidance": JSON_OPTIONS}
            return StructTag(trigger=trigger, begin=begin, grammar={**checked(schema), **options}, end=end)
    raise ValueError("a structure is an object with begin and end, strings, and schema, an object")


def _special_token(text: str, tokenizer: LLTokenizer) -> int | None:
    """Return the id of the special token that has this name, if there is one."""
    token_ids = tokenizer.tokenize_str(text, parse_special=True)
    return token_ids[0] if len(token_ids) == 1 and tokenizer.is_special_token(token_ids[0]) else None
