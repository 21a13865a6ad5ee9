"""What clients see when something fails, or when they go away."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from kvern.services.gateway.client_watch import MAX_BODY_BYTES, MAX_HEADERS
from kvern.services.runtime.channel import MAX_AUTHORIZATION_BYTES
from kvern.services.runtime.errors import (
    AlreadyExists,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    ServiceError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from kvern.v1 import inference_pb2

from .scripted_router import STARTED, delta, fails_after, finished, responds, stalls_after, together
from .setup import CHAT, COMPLETIONS, USER, Setup

pytestmark = pytest.mark.asyncio(loop_scope="package")

BODIES: dict[str, dict[str, object]] = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": ["Hello", "you"]}}
NUM_CALLS = {CHAT: 1, COMPLETIONS: 2}
"""To the router, for each of BODIES."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (InvalidArgument("chat", "no"), 400, "invalid_request_error", "invalid_value", "messages"),  # B03, B17
        (InvalidArgument("sampling.top_p", "no"), 400, "invalid_request_error", "invalid_value", "top_p"),
        (Unsupported("adapter", "no"), 400, "invalid_request_error", "unsupported_parameter", "adapter"),
        (Unauthenticated("no key"), 401, "invalid_request_error", "invalid_api_key", None),
        (PermissionDenied("not yours"), 403, "invalid_request_error", "permission_denied", None),
        (NotFound("no such model", reason="MODEL_NOT_FOUND"), 404, "invalid_request_error", "model_not_found", "model"),
        (AlreadyExists("in flight"), 409, "invalid_request_error", "already_exists", None),
        (ResourceExhausted("full", retry_after_s=1.2), 429, "rate_limit_error", "rate_limit_exceeded", None),
        (Internal("broken", reason="POISON"), 500, "server_error", "poison", None),
        (ValueError("a fault"), 500, "server_error", None, None),
        (Unavailable("no replica is ready"), 503, "server_error", "unavailable", None),
    ],
)
async def test_failure_before_start_has_its_status(
    setup: Setup, stream: bool, error: Exception, status: int, kind: str, code: str | None, param: str | None
) -> None:
    setup.router.behaviour = fails_after(error)
    response = await setup.chat(stream=stream)
    body = response.json()["error"]
    assert (response.status_code, body["type"], body["code"], body["param"]) == (status, kind, code, param)
    assert response.headers.get("retry-after") == ("2" if status == 429 else None)
    assert response.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
    if isinstance(error, ServiceError):
        assert error.message.rpartition(": ")[2] in body["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_stream_failure_in_the_middle_is_the_last_event(setup: Setup, path: str) -> None:
    setup.router.behaviour = fails_after(Unavailable("the replica is gone"), STARTED, delta("Hel"))
    *_, text, last = await setup.events(path)
    assert "Hel" in str(text["choices"])
    assert last["error"]["message"] == "the replica is gone"
    assert last["error"]["code"] == "unavailable"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "kind", "status"), [("", "server_error", 500), ("NOTHING_ALLOWED", "invalid_request_error", 400)]
)
async def test_choice_that_failed_is_an_error(
    setup: Setup, path: str, stream: bool, reason: str, kind: str, status: int
) -> None:
    """D18."""
    failed = finished(inference_pb2.FINISH_REASON_ERROR, error="logits are NaN", error_reason=reason)
    setup.router.behaviour = together(NUM_CALLS[path], responds(STARTED, delta("x"), failed))
    response = await setup.client.post(path, json=BODIES[path] | {"stream": stream})
    last = json.loads(response.text.strip().rpartition("\n\n")[2].removeprefix("data: "))
    assert last["error"]["message"] == "logits are NaN"
    assert last["error"]["type"] == kind
    assert response.status_code == (200 if stream else status)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_started", [False, True])
async def test_client_that_leaves_before_the_first_token_cancels_calls(
    setup: Setup, path: str, stream: bool, has_started: bool
) -> None:
    """E02, before any token: a stream may have sent its head."""
    setup.router.behaviour = stalls_after(*[STARTED] * has_started)
    asking = asyncio.create_task(setup.client.post(path, json=BODIES[path] | {"stream": stream}))
    for _ in range(NUM_CALLS[path]):
        await setup.router.begun.acquire()
    assert not setup.router.ended.is_set()
    asking.cancel()
    await asyncio.wait_for(setup.router.ended.wait(), 10)


async def test_client_that_leaves_mid_stream_cancels_call(setup: Setup) -> None:
    """E02."""
    setup.router.behaviour = stalls_after(STARTED, delta("Hel"))
    body = {"messages": [USER], "stream": True}
    async with setup.client.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            if "Hel" in line:
                break
        assert not setup.router.ended.is_set()
    await asyncio.wait_for(setup.router.ended.wait(), 10)


async def test_authorization_goes_with_every_call(setup: Setup) -> None:
    token = "Bearer " + "x" * (MAX_AUTHORIZATION_BYTES - 7)
    headers = {"Authorization": token}
    chat = BODIES[CHAT] | {"chat_template_kwargs": {"of": "authorization"}}
    await setup.chat(**chat)  # the first with these asks how the template ends
    setup.router.expect_call()
    responses = [
        await setup.client.post(CHAT, json=chat, headers=headers),
        await setup.client.post("/tokenize", json={"prompt": "a"}, headers=headers),
        await setup.client.post("/detokenize", json={"tokens": [97]}, headers=headers),
        await setup.client.get("/v1/models", headers=headers),
        await setup.client.get("/v1/models/tiny", headers=headers),
    ]
    # Many times, because gRPC refuses what is a little over its bound for metadata at random.
    responses += [await setup.client.get("/v1/models", headers=headers) for _ in range(95)]
    assert {response.status_code for response in responses} == {200}
    assert setup.router.authorizations == [token] * 100
    await setup.client.get("/v1/models")
    assert setup.router.authorizations[-1] is None


@pytest.mark.parametrize(
    "headers",
    [
        [("Authorization", "Bearer a"), ("Authorization", "Bearer b")],
        [("Authorization", "x" * (MAX_AUTHORIZATION_BYTES + 1))],
        [("Authorization", b"\xc3\xa9")],
    ],
)
async def test_authorization_that_cannot_be_passed_on_is_refused(
    setup: Setup, headers: list[tuple[str, str | bytes]]
) -> None:
    response = await setup.client.post(CHAT, json=BODIES[CHAT], headers=httpx.Headers(headers))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "Authorization")
    assert setup.router.authorizations == []


async def test_body_beyond_bound_is_refused(setup: Setup) -> None:
    headers = {"Content-Type": "application/json"}
    response = await setup.client.post(CHAT, content=b"x" * (MAX_BODY_BYTES + 1), headers=headers)
    assert response.status_code == 413
    assert str(MAX_BODY_BYTES) in response.json()["error"]["message"]


async def test_too_many_headers_are_refused(setup: Setup) -> None:
    headers = {f"x-{number}": "y" for number in range(MAX_HEADERS)}
    response = await setup.client.get("/health", headers=headers)
    assert response.status_code == 431
    assert str(MAX_HEADERS) in response.json()["error"]["message"]


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_body_of_a_type_that_any_page_may_send_is_refused(setup: Setup, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = await setup.client.post(CHAT, content=b"{}", headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (415, "Content-Type")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/none", 404), ("GET", CHAT, 405), ("POST", "/health", 405), ("POST", f"{CHAT}/", 404)],
)
async def test_unknown_path_or_method_is_an_error_in_openai_form(
    setup: Setup, method: str, path: str, status: int
) -> None:
    response = await setup.client.request(method, path)
    assert response.status_code == status
    assert path in response.json()["error"]["message"]
