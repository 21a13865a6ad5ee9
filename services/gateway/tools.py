"""Tools that a chat may call: what is told to the model, what it must answer, and calls that are replayed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from kvern.services.gateway.request_body import Body
from kvern.v1.inference_pb2 import Constraint

MAX_TOOLS = 128

CacheControl = dict[str, object]
"""Clients mark with it what is to be cached, which all of a prompt is anyway."""


class FunctionDefinition(Body):
    """A function as the model is told of it."""

    neutral: ClassVar = {"strict": (True, False)}

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments."""

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """What arguments must match: always an object."""
        return {"type": "object", **(self.parameters or {"properties": {}, "additionalProperties": False})}


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: CacheControl | None = None


class NamedFunction(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Body):
    """A function that was called, and with what."""

    name: str
    arguments: str | dict[str, Any]
    """JSON text of an object, or the object."""
    parsed_arguments: object = None
    """OpenAI's client sends back what it made of the arguments."""


class ReplayedCall(Body):
    """A call that an earlier answer made."""

    neutral: ClassVar = {"index": tuple(range(MAX_TOOLS))}  # of a stream's deltas

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction

    def to_json(self) -> dict[str, Any]:
        """Return it as templates know it: arguments as text, which the tokenizer makes an object for all of them."""
        arguments = self.function.arguments
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": self.function.name, "arguments": arguments.strip() or "{}"}
        call = {"type": "function", "function": function}
        return call if self.id is None else {"id": self.id, **call}


def tools_json(tools: Sequence[Tool]) -> str:
    """Return the tools as templates know them."""
    return json.dumps(
        [tool.model_dump(exclude_none=True, exclude={"cache_control"}) for tool in tools], ensure_ascii=False
    )


def schema_of_arguments(tool: Tool) -> Constraint:
    """Constrain an output to the arguments of one tool."""
    return Constraint(json_schema=json.dumps(tool.function.schema_of_arguments))


def schema_of_calls(tools: Sequence[Tool], *, in_parallel: bool) -> Constraint:
    """Constrain an output to a list of calls, one at least: `[{"name": ..., "parameters": {...}}]`."""
    return Constraint(json_schema=json.dumps(list_of_calls(tools, "parameters", in_parallel=in_parallel)))


def list_of_calls(tools: Sequence[Tool], arguments: str, *, in_parallel: bool) -> dict[str, Any]:
    """Return the schema of a list of calls, one at least: `[{"name": ..., <arguments>: {...}}]`."""
    schema = {"type": "array", "minItems": 1, "items": one_call(tools, arguments, "#/items")}
    return schema if in_parallel else {**schema, "maxItems": 1}


def one_call(tools: Sequence[Tool], arguments: str, place: str = "#") -> dict[str, Any]:
    """Return the schema of a call, `{"name": ..., <arguments>: {...}}`, for this place in a schema."""
    places = (f"{place}/anyOf/{index}/properties/{arguments}" for index in range(len(tools)))
    return {"anyOf": [_call_of(tool, arguments, where) for tool, where in zip(tools, places, strict=True)]}


def _call_of(tool: Tool, arguments: str, place: str) -> dict[str, Any]:
    schema = _moved(tool.function.schema_of_arguments, place)
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, arguments: schema},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """Return a schema whose references within itself hold where it is put."""
    if isinstance(schema, dict):
        moved = {key: _moved(value, place) for key, value in schema.items()}
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved["$ref"] = place + reference[1:]
        return moved
    return [_moved(item, place) for item in schema] if isinstance(schema, list) else schema
