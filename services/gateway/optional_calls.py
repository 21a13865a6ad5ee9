"""Outputs that are tool calls or else content of a form: one constraint, which has calls as `parsing` reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from kvern.services.gateway.errors import ApiError
from kvern.services.gateway.parsing.hermes import HERMES
from kvern.services.gateway.parsing.llama3 import LLAMA3
from kvern.services.gateway.parsing.mistral import MISTRAL
from kvern.services.gateway.tools import Tool, list_of_calls, one_call
from kvern.v1.inference_pb2 import Constraint

_Format = dict[str, Any]


def content_or_calls(
    field: str, content: Constraint, tools: Sequence[Tool], tool_format: str, *, in_parallel: bool
) -> Constraint:
    """Constrain an output to content of a form, or to calls as models of a tool format write them, one at least.

    Raises ApiError, naming the content's field, where that is held to anything but JSON: text of another form might
    begin as a call does.
    """
    form = _or(_json(_schema_of(field, content)), *_calls(tools, tool_format, in_parallel=in_parallel))
    return Constraint(structural_tag=json.dumps({"type": "structural_tag", "format": form}))


def _schema_of(field: str, content: Constraint) -> dict[str, Any]:
    if content.json_object:
        return {"type": "object"}
    if not content.HasField("json_schema"):
        message = f"{field}: cannot hold where tools may be called, as only a JSON schema or json_object can"
        raise ApiError(400, message, field, "unsupported_parameter")
    try:
        schema = json.loads(content.json_schema)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise ApiError(400, f"{field}: must be a JSON object", field, "invalid_value")
    return schema


def _calls(tools: Sequence[Tool], tool_format: str, *, in_parallel: bool) -> list[_Format]:
    writers = _WRITERS.values() if tool_format == "auto" else [_WRITERS[tool_format]]
    return [writer(tools, in_parallel) for writer in writers]


def _hermes(tools: Sequence[Tool], in_parallel: bool) -> _Format:
    content = _sequence(_text("\n"), _json(one_call(tools, "arguments")), _text("\n"))
    return _tags([_tag(HERMES.opening, content, HERMES.closing)], "\n", in_parallel)


def _llama3(tools: Sequence[Tool], in_parallel: bool) -> _Format:
    calls = _tags([_tag("", _json(one_call(tools, "parameters")), "")], "; ", in_parallel)
    return _sequence(_or(_text(LLAMA3.opening), _text("")), calls)


def _mistral(tools: Sequence[Tool], in_parallel: bool) -> _Format:
    listed = _json(list_of_calls(tools, "arguments", in_parallel=in_parallel))
    space = _or(_text(" "), _text(""))
    named = [_tag(MISTRAL.opening, _named(tool), "") for tool in tools]
    return _or(_sequence(_text(MISTRAL.opening), space, listed), _tags(named, "", in_parallel))


def _named(tool: Tool) -> _Format:
    marker = _or(_text("[ARGS]"), _text(""))
    return _sequence(_text(tool.function.name), marker, _json(tool.function.schema_of_arguments))


_WRITERS: dict[str, Callable[[Sequence[Tool], bool], _Format]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
}


def _text(value: str) -> _Format:
    return {"type": "const_string", "value": value}


def _json(schema: dict[str, Any]) -> _Format:
    return {"type": "json_schema", "json_schema": schema}


def _sequence(*elements: _Format) -> _Format:
    return {"type": "sequence", "elements": list(elements)}


def _or(*elements: _Format) -> _Format:
    return {"type": "or", "elements": list(elements)}


def _tag(begin: str, content: _Format, end: str) -> _Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _tags(tags: list[_Format], separator: str, in_parallel: bool) -> _Format:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not in_parallel,
    }
