"""The HTTP door, tried with what its own description allows, and with what it does not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.up_process import PATIENCE_S, UpProcess

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
MOST = {"max_tokens": 2, "max_completion_tokens": 2, "min_tokens": 2, "n": 2}
SETTINGS = settings(
    max_examples=20, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def api(running_set: UpProcess) -> BaseSchema:
    return schemathesis.openapi.from_url(f"http://{running_set.http}/openapi.json")


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *itertools.product(["POST"], POSTS, list(GenerationMode)),
        ("GET", "/v1/models/{model}", GenerationMode.POSITIVE),  # any text is a name
    ],
)
def test_whatever_is_sent_is_answered_as_described(
    api: BaseSchema, method: str, path: str, mode: GenerationMode
) -> None:
    operation = api[path][method]

    @settings(SETTINGS)
    @given(case=operation.as_strategy(generation_mode=mode))
    def answers(case: schemathesis.Case) -> None:
        _tame(case.body)
        case.call_and_validate(checks=CHECKS, timeout=PATIENCE_S)

    answers()


def _tame(body: Any) -> None:
    """Ask for the model that there is, and for short answers: longer ones would test the model, and take long."""
    if not isinstance(body, dict):
        return
    body.pop("model", None)
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            message["content"] = message.get("content") or "Hello"
            message.pop("tool_calls", None)  # their arguments are JSON, of which the description says nothing
    for name, most in MOST.items():
        if isinstance(value := body.get(name), int):
            body[name] = min(value, most)
    if body.get("max_completion_tokens") is None and body.get("max_tokens") is None:
        body["max_tokens"] = 2
