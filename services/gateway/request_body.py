"""From a request's body to a validated object, or an error that names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, from_json
from starlette.requests import Request

from kvern.services.gateway.errors import ApiError


class Body(BaseModel):
    """Base of what clients send: types are not coerced, and what is not acted on is refused, never ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    neutral: ClassVar[Mapping[str, Sequence[object]]] = {}
    """Further fields, each with the values that ask for nothing: clients may send those. Null always does."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if not cls._is_neutral(name, value)}

    @classmethod
    def _is_neutral(cls, name: str, value: object) -> bool:
        if value is None:
            return name not in _names(cls)
        return _is_one_of(value, cls.neutral.get(name, ()))

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).setdefault("properties", {})
        for name, values in cls.neutral.items():
            properties.setdefault(name, {"enum": [None, *values], "description": "Taken where it asks for nothing."})
        return schema


@cache
def _names(kind: type[Body]) -> frozenset[str]:
    """Return what a body calls its fields."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


def _is_one_of(value: object, neutral: Sequence[object]) -> bool:
    # To Python, 1 is True.
    return any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in neutral)


JSON = "application/json"

MAX_VALUES = 65_536
"""Names and values in a body. Each may be an error to report or an object to make, which takes microseconds."""

_UNCOUNTED = ("prompt", "tokens", "allowed_token_ids")
"""Fields of any number of ids, whose check ends at the first that is wrong."""

_Body = TypeVar("_Body", bound=Body)
_Other = TypeVar("_Other", bound=Body)

_CODES = {"extra_forbidden": "unsupported_parameter", "missing": "missing_required_parameter"}
_MESSAGES = {
    "extra_forbidden": "Not supported by this server",
    "model_type": "Input should be an object",
    "model_attributes_type": "Input should be an object",
}


async def parse(kind: type[_Body], request: Request) -> _Body:
    """Parse a JSON body. Raises ApiError with status 400 or 415."""
    return _validate(kind, await _read(request))


async def parse_either(kind: type[_Body], other: type[_Other], field: str, request: Request) -> _Body | _Other:
    """Parse a JSON body of the one kind if it has the field, else of the other. Raises ApiError likewise."""
    document = await _read(request)
    return _validate(other if document.get(field) is None else kind, document)


async def _read(request: Request) -> dict[str, Any]:
    # Of other types, browsers would send what a foreign page asks for without asking us first.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise ApiError(415, f"Content-Type: must be {JSON}", "Content-Type", "invalid_value")
    # This parser refuses half a surrogate pair, which no tokenizer takes, and more than 200 levels.
    try:
        document = from_json(await request.body(), allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ApiError(400, "the body must be a JSON object")
    _check_count(document)
    return document


def _check_count(document: dict[str, Any]) -> None:
    """Refuse what would take seconds and gigabytes to check. Raises ApiError."""
    room = MAX_VALUES - len(document)
    for name, value in document.items():
        if name not in _UNCOUNTED:
            room -= _num_values(value, room)
        if room < 0:
            message = f"{name}: a body may hold {MAX_VALUES} names and values, this one has more"
            raise ApiError(400, message, name, "invalid_value")


def _num_values(value: object, limit: int) -> int:
    """Count the values within another one, as far as `limit`."""
    count, open_ = 0, [value]
    while open_ and count <= limit:
        match open_.pop():
            case dict() as names:
                count += len(names)
                open_ += names.values() if count <= limit else ()
            case list() as items:
                count += len(items)
                open_ += items if count <= limit else ()
    return count


def _validate(kind: type[_Body], document: dict[str, Any]) -> _Body:
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise _refusal(error, document) from error


def _refusal(error: ValidationError, document: dict[str, Any]) -> ApiError:
    """Report the errors deepest in the document: of a union's alternatives, that is the one that came closest."""
    items = error.errors(include_url=False, include_context=False, include_input=False)
    located = [(_path(item["loc"], document), item) for item in items]
    deepest = max((path for path, _ in located), key=len)
    there = [item for path, item in located if path == deepest]
    messages = dict.fromkeys(_MESSAGES.get(item["type"], item["msg"]) for item in there)
    param = _param(deepest)
    return ApiError(400, f"{param}: {' or '.join(messages)}", param, _code(there[0]))


def _path(loc: Sequence[str | int], document: Any) -> tuple[str | int, ...]:
    """Return an error's place in the document: its `loc` without the names pydantic gives a union's alternatives."""
    path: list[str | int] = []
    here = document
    for step in loc:
        if isinstance(here, dict) and isinstance(step, str):
            here = here.get(step)
        elif isinstance(here, list) and isinstance(step, int):
            here = here[step]
        else:
            continue
        path.append(step)
    return tuple(path)


def _param(path: Sequence[str | int]) -> str:
    """Return a path as OpenAI writes it: messages[0].content."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def _code(item: ErrorDetails) -> str:
    return "invalid_type" if item["type"].endswith("_type") else _CODES.get(item["type"], "invalid_value")
