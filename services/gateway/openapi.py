"""The door's OpenAPI document, made from the bodies that it takes and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from pydantic_core import to_json

from kvern.services.gateway import answers
from kvern.services.gateway.chat_request import ChatCompletionRequest
from kvern.services.gateway.client_watch import MAX_BODY_BYTES
from kvern.services.gateway.completion_request import CompletionRequest
from kvern.services.gateway.request_body import JSON
from kvern.services.gateway.tokenize_request import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from kvern.version import __version__

_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    408: "The body took too long to come.",
    415: "The body is not JSON.",
    429: "A bound is reached; Retry-After says in how many seconds to try again.",
    431: "There are too many headers.",
    500: "A fault of the server.",
}
"""What any request may be answered."""

_ROUTER_ERRORS = {
    401: "Who asks is not known.",
    403: "Who asks may not do this.",
    503: "No router or replica is there; the same request may succeed later.",
    504: "It took too long.",
}

_BODY_ERRORS = {
    404: "The model is not served here.",
    413: f"The body is longer than {MAX_BODY_BYTES} bytes.",
}

_GENERATION_ERRORS = {409: "A request of this id is in flight."}


@dataclass(frozen=True)
class _Operation:
    """One route. What it answers is a model, or text of a media type."""

    method: str
    summary: str
    answer: type[BaseModel] | str
    bodies: tuple[type[BaseModel], ...] = ()
    event: type[BaseModel] | None = None
    """Of its stream, if it can stream."""
    errors: Mapping[int, str] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()


_OPERATIONS: dict[str, _Operation] = {
    "/v1/models": _Operation(
        "get", "List the models that can be asked for now", answers.ModelList, errors=_ROUTER_ERRORS
    ),
    "/v1/models/{model}": _Operation(
        "get", "Get one model", answers.Model, errors={**_ROUTER_ERRORS, 404: _BODY_ERRORS[404]}, parameters=("model",)
    ),
    "/v1/completions": _Operation(
        "post",
        "Complete prompts",
        answers.Completion,
        (CompletionRequest,),
        answers.CompletionChunk,
        {**_ROUTER_ERRORS, **_BODY_ERRORS, **_GENERATION_ERRORS},
    ),
    "/v1/chat/completions": _Operation(
        "post",
        "Answer a chat",
        answers.ChatCompletion,
        (ChatCompletionRequest,),
        answers.ChatCompletionChunk,
        {**_ROUTER_ERRORS, **_BODY_ERRORS, **_GENERATION_ERRORS},
    ),
    "/tokenize": _Operation(
        "post",
        "Tell the token ids of a text or a chat",
        answers.Tokenized,
        (TokenizeRequest, TokenizeChatRequest),
        errors={**_ROUTER_ERRORS, **_BODY_ERRORS},
    ),
    "/detokenize": _Operation(
        "post",
        "Tell the text of token ids",
        answers.Detokenized,
        (DetokenizeRequest,),
        errors={**_ROUTER_ERRORS, **_BODY_ERRORS},
    ),
    "/health": _Operation("get", "Tell whether requests can be served", answers.Health),
    "/version": _Operation("get", "Tell what runs here", answers.Version),
    "/metrics": _Operation("get", "Tell metrics of this process in Prometheus' text format 0.0.4", "text/plain"),
    "/openapi.json": _Operation("get", "Tell this description", answers.Document),
}


@cache
def describe() -> bytes:
    """Return the OpenAPI 3.1 document of all routes, as JSON."""
    schemas = _schemas()
    paths = {path: {operation.method: _describe(path, operation)} for path, operation in _OPERATIONS.items()}
    paths["/health"]["get"]["responses"]["503"] = _response("They cannot, for now.", _content(answers.Health))
    return to_json(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Kvern",
                "version": __version__,
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
                "description": "OpenAI's API of completions and chats, with vLLM's common extensions.",
            },
            "security": [{}, {"bearer": []}],
            "paths": paths,
            "components": {"schemas": schemas, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        }
    )


def _schemas() -> dict[str, Any]:
    kinds: list[tuple[type[BaseModel], JsonSchemaMode]] = [(answers.ErrorAnswer, "serialization")]
    for operation in _OPERATIONS.values():
        kinds += [(body, "validation") for body in operation.bodies]
        if not isinstance(operation.answer, str):
            kinds.append((operation.answer, "serialization"))
        if operation.event is not None:
            kinds.append((operation.event, "serialization"))
    schemas: dict[str, Any] = models_json_schema(kinds, ref_template=_REF)[1]["$defs"]
    return schemas


def _describe(path: str, operation: _Operation) -> dict[str, Any]:
    content = _content(operation.answer)
    if operation.event is not None:
        content["text/event-stream"] = {"schema": _event(operation.event)}
    described: dict[str, Any] = {
        "operationId": path.strip("/").replace("/", "_").replace(".", "_").replace("{", "").replace("}", ""),
        "summary": operation.summary,
        "responses": {"200": _response("Done.", content), **_errors(operation)},
    }
    if operation.bodies:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": _any_of(operation.bodies)}}}
    if operation.parameters:
        described["parameters"] = [_parameter(name) for name in operation.parameters]
    return described


def _event(chunk: type[BaseModel]) -> dict[str, Any]:
    """Describe one event of a stream. Lines that begin with a colon are comments."""
    object_ = {"contentMediaType": JSON, "contentSchema": _any_of((chunk, answers.ErrorAnswer))}
    data = {"type": "string", "anyOf": [{"const": "[DONE]"}, object_]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _errors(operation: _Operation) -> dict[str, Any]:
    told = {**_ERRORS, **operation.errors}
    return {str(status): _response(told[status], _content(answers.ErrorAnswer)) for status in sorted(told)}


def _response(description: str, content: dict[str, Any]) -> dict[str, Any]:
    headers = {"X-Request-Id": {"schema": {"type": "string"}, "description": "The request's id, as logs have it."}}
    return {"description": description, "headers": headers, "content": content}


def _content(answer: type[BaseModel] | str) -> dict[str, Any]:
    return {answer: {"schema": {"type": "string"}}} if isinstance(answer, str) else {JSON: {"schema": _ref(answer)}}


def _any_of(models: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    return _ref(models[0]) if len(models) == 1 else {"anyOf": [_ref(model) for model in models]}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
