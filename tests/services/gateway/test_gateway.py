"""The HTTP door, on a gateway process in front of a router that does what the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio

from kvern.services.gateway.client_watch import MAX_BODY_BYTES
from kvern.services.runtime.errors import NotFound, ResourceExhausted, Unavailable
from kvern.v1 import inference_pb2
from tests.services.processes import running
from tests.services.scraping import EVERY_SERVICE, scrape, scrape_until, status_address

from .http_client import until_listening
from .scripted_router import STARTED, ScriptedRouter, delta, fails_after, finished, responds, stalls_after

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = {"role": "user", "content": "Hello"}
CHAT = "/v1/chat/completions"

METRICS = EVERY_SERVICE | {
    "kvern_gateway_requests_total",
    "kvern_gateway_request_duration_seconds",
    "kvern_gateway_open_streams",
}


@dataclass
class Setup:
    """A gateway, the router behind it, and a client."""

    router: ScriptedRouter
    client: httpx.AsyncClient
    status: str
    """Where it tells its metrics."""

    async def chat(self, **fields: object) -> httpx.Response:
        return await self.client.post(CHAT, json={"messages": [USER]} | fields)

    async def refused(self, **fields: object) -> dict[str, Any]:
        """Return the error of a request that is refused for what it says."""
        response = await self.chat(**fields)
        assert response.status_code == 400, response.text
        error: dict[str, Any] = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert self.router.received == []
        return error

    async def events(self, **fields: object) -> list[Any]:
        """Return the data of a stream's events, parsed but for the last."""
        response = await self.chat(stream=True, **fields)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.text.split("\n\n")
        assert lines.pop() == ""
        data = [line.removeprefix("data: ") for line in lines]
        return [each if each == "[DONE]" else json.loads(each) for each in data]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory, listen: str) -> AsyncIterator[Setup]:
    folder = tmp_path_factory.mktemp("gateway")
    router, address, status = ScriptedRouter(), f"unix:{folder}/router.sock", status_address()
    flags = ("--listen", listen, "--router", address, "--status-listen", status)
    async with (
        router.serving(address),
        running("gateway", *flags, log=folder / "log"),
        httpx.AsyncClient(base_url=f"http://{listen}", timeout=20) as client,
    ):
        await until_listening(client)
        yield Setup(router, client, status)


@pytest.fixture
def setup(started: Setup) -> Setup:
    started.router.behaviour = responds(STARTED, delta("Hi"), finished())
    started.router.expect_call()
    return started


async def test_chat_answers_in_openai_form(setup: Setup) -> None:
    setup.router.behaviour = responds(STARTED, delta("Hel"), delta(""), delta("lo"), finished())
    response = await setup.chat(model="tiny")
    answer = response.json()
    assert response.status_code == 200
    assert answer.pop("created") > 0
    assert answer == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


async def test_chat_out_of_tokens_finishes_with_length(setup: Setup) -> None:
    setup.router.behaviour = responds(STARTED, finished(inference_pb2.FINISH_REASON_LENGTH))
    assert (await setup.chat()).json()["choices"][0]["finish_reason"] == "length"


async def test_chat_stream_sends_chunks_then_done(setup: Setup) -> None:
    setup.router.behaviour = responds(STARTED, delta("Hel"), delta(""), delta("lo ⛄"), finished())
    *chunks, done = await setup.events(model="tiny")
    assert done == "[DONE]"
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-r1"}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo ⛄"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]


async def test_chat_stream_with_usage_ends_with_it(setup: Setup) -> None:
    *chunks, last, done = await setup.events(stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 9
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_chat_request_reaches_router_whole(setup: Setup) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": parts, "name": "me"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    await setup.chat(
        model="tiny", messages=messages, temperature=0, top_p=0.5, top_k=3, seed=-1, max_tokens=5, stop="x", user="u"
    )
    [request] = setup.router.received
    system, user, assistant, tool = request.chat.messages
    assert request.model == "tiny"
    assert (system.HasField("content"), system.content) == (True, "")
    assert (user.role, user.content, user.name) == ("user", "a\nb", "me")
    assert (assistant.HasField("content"), json.loads(assistant.tool_calls_json)) == (False, [{"id": "1"}])
    assert (tool.content, tool.tool_call_id) == ("4", "1")
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0, 0.5, 3)
    assert request.sampling.HasField("temperature")
    assert request.sampling.seed == 2**64 - 1
    assert (request.stopping.max_tokens, list(request.stopping.stop)) == (5, ["x"])


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}, {"temperature": None, "stop": None, "n": None}])
async def test_chat_null_or_absent_leaves_default_to_contract(setup: Setup, fields: dict[str, None]) -> None:
    """B20."""
    assert (await setup.chat(**fields)).status_code == 200
    [request] = setup.router.received
    assert not request.stopping.HasField("max_tokens")
    assert not request.sampling.ListFields()
    assert not request.stopping.stop


async def test_chat_neutral_values_of_unsupported_fields_are_accepted(setup: Setup) -> None:
    neutral = {
        "n": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "logit_bias": {},
        "logprobs": False,
        "top_logprobs": None,
        "response_format": {"type": "text"},
        "tools": [],
        "stream_options": None,
        "store": False,
    }
    response = await setup.chat(**neutral)
    assert response.status_code == 200, response.text


async def test_chat_sampling_fields_reach_the_router(setup: Setup) -> None:
    fields = {"n": 2, "frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": {"5": 1}}
    response = await setup.chat(**fields)
    assert response.status_code == 200, response.text
    [request] = setup.router.received
    sampling = request.sampling
    assert (sampling.n, sampling.frequency_penalty, sampling.presence_penalty) == (2, 0.5, -0.5)
    assert dict(sampling.logit_bias) == {5: 1.0}


@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, inference_pb2.Constraint(json_object=True)),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "integer"}}},
            inference_pb2.Constraint(json_schema='{"type": "integer"}'),
        ),
    ],
)
async def test_chat_response_format_becomes_a_constraint(
    setup: Setup, response_format: dict[str, object], expected: inference_pb2.Constraint | None
) -> None:
    assert (await setup.chat(response_format=response_format)).status_code == 200
    [request] = setup.router.received
    assert (request.constraint if request.HasField("constraint") else None) == expected


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("logprobs", True),
        ("no_such_field", 1),
    ],
)
async def test_chat_unsupported_field_is_refused_by_name(setup: Setup, param: str, value: object) -> None:
    error = await setup.refused(**{param: value})
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("temperature", {"temperature": -1}),
        ("temperature", {"temperature": "hot"}),
        ("temperature", {"temperature": True}),
        ("top_p", {"top_p": 1.1}),
        ("top_k", {"top_k": -1}),
        ("seed", {"seed": 2**64}),
        ("n", {"n": 0}),
        ("n", {"n": 2**32 - 1}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": -1}),
        ("max_tokens", {"max_tokens": 2**32}),
        ("max_tokens", {"max_tokens": 1.5}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("max_completion_tokens", {"max_completion_tokens": 1, "max_tokens": 1}),
        ("stop[1]", {"stop": ["x", ""]}),
        ("stop[1]", {"stop": ["x", 5]}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        ("logit_bias.x", {"logit_bias": {"x": 1}}),
        ("messages", {"messages": []}),
        ("messages", {"messages": "Hello"}),
        ("messages[1].role", {"messages": [USER, {"content": "Hello"}]}),
        ("messages[0].role", {"messages": [{"role": "", "content": "Hello"}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "x", "text": "y"}]}]}),
        ("messages[0]", {"messages": ["Hello"]}),
    ],
)
async def test_chat_bad_value_names_param(setup: Setup, param: str, fields: dict[str, object]) -> None:
    error = await setup.refused(**fields)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert error["code"] in ("invalid_value", "invalid_type", "missing_required_parameter")


@pytest.mark.parametrize(("content", "param"), [(123, "messages[0].content"), ([["x"]], "messages[0].content[0]")])
async def test_chat_content_of_wrong_type_names_field(setup: Setup, content: object, param: str) -> None:
    """B19."""
    error = await setup.refused(messages=[{"role": "user", "content": content}])
    assert (error["param"], error["code"]) == (param, "invalid_type")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"messages": [{"role": "user", "content": "\\udc8d"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b"[" * 100_000,
    ],
)
async def test_chat_malformed_json_is_refused(setup: Setup, body: bytes) -> None:
    """B12 among them."""
    response = await setup.client.post(CHAT, content=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "JSON" in error["message"]


async def test_chat_body_beyond_bound_is_refused(setup: Setup) -> None:
    response = await setup.client.post(CHAT, content=b"x" * (MAX_BODY_BYTES + 1))
    assert response.status_code == 413
    assert str(MAX_BODY_BYTES) in response.json()["error"]["message"]


async def test_chat_five_megabytes_reach_router(setup: Setup) -> None:
    text = "word " * 1_000_000
    assert (await setup.chat(messages=[{"role": "user", "content": text}])).status_code == 200
    assert setup.router.received[0].chat.messages[0].content == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (NotFound("no such model", reason="MODEL_NOT_FOUND"), 404, "invalid_request_error", "model_not_found", "model"),
        (ResourceExhausted("full", retry_after_s=1.2), 429, "rate_limit_error", "rate_limit_exceeded", None),
        (Unavailable("no replica is ready"), 503, "server_error", "unavailable", None),
        (ValueError("a fault"), 500, "server_error", None, None),
    ],
)
async def test_chat_failure_before_start_has_its_status(
    setup: Setup, stream: bool, error: Exception, status: int, kind: str, code: str | None, param: str | None
) -> None:
    setup.router.behaviour = fails_after(error)
    response = await setup.chat(stream=stream)
    body = response.json()["error"]
    assert (response.status_code, body["type"], body["code"], body["param"]) == (status, kind, code, param)
    assert response.headers.get("retry-after") == ("2" if status == 429 else None)


async def test_chat_stream_failure_in_the_middle_is_the_last_event(setup: Setup) -> None:
    setup.router.behaviour = fails_after(Unavailable("the replica is gone"), STARTED, delta("Hel"))
    *_, text, last = await setup.events()
    assert text["choices"][0]["delta"] == {"content": "Hel"}
    assert last["error"]["message"] == "the replica is gone"


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_choice_that_failed_is_an_error(setup: Setup, stream: bool) -> None:
    setup.router.behaviour = responds(STARTED, finished(inference_pb2.FINISH_REASON_ERROR, error="logits are NaN"))
    last = (await setup.events())[-1] if stream else (await setup.chat()).json()
    assert last["error"]["message"] == "logits are NaN"
    assert last["error"]["type"] == "server_error"


async def test_chat_client_disconnects_cancels_call(setup: Setup) -> None:
    """E02, before the first byte of the answer."""
    setup.router.behaviour = stalls_after()
    asking = asyncio.create_task(setup.chat())
    await setup.router.begun.wait()
    assert not setup.router.ended.is_set()
    asking.cancel()
    await asyncio.wait_for(setup.router.ended.wait(), 10)


async def test_chat_client_disconnects_mid_stream_cancels_call(setup: Setup) -> None:
    """E02."""
    setup.router.behaviour = stalls_after(STARTED, delta("Hel"))
    body = {"messages": [USER], "stream": True}
    async with setup.client.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            if "Hel" in line:
                break
        assert not setup.router.ended.is_set()
    await asyncio.wait_for(setup.router.ended.wait(), 10)


async def test_metrics_count_by_route_and_code_and_a_client_that_left_apart(setup: Setup) -> None:
    """H08: paths that clients make up share one series."""
    before = await scrape_until(setup.status, lambda now: not now("kvern_gateway_open_streams"))
    before.assert_has(METRICS)

    async def counted(num_requests: int) -> Callable[..., float]:
        """Wait until so many requests are counted. Return what tells how many have some labels."""
        name = "kvern_gateway_requests_total"
        after = await scrape_until(setup.status, lambda now: now(name) >= before(name) + num_requests)
        return lambda **labels: after(name, **labels) - before(name, **labels)

    await setup.chat()
    await setup.events()
    await setup.chat(temperature="hot")
    await setup.client.get(CHAT)
    setup.router.behaviour = stalls_after(STARTED, delta("Hi"))
    async with setup.client.stream("POST", CHAT, json={"messages": [USER], "stream": True}) as response:
        lines = response.aiter_lines()  # kept: the end of it would be the stream's
        assert "assistant" in await anext(lines)
        assert (await scrape(setup.status))("kvern_gateway_open_streams") == 1
    more = await counted(5)
    assert [more(route=CHAT, code=code) for code in ("200", "400", "405", "499")] == [2, 1, 1, 1]
    for number in range(20):
        await setup.client.get(f"/v1/made/up/{number}")
    more = await counted(25)
    assert more(route="other", code="404") == more(route="other") == 20
    after = await scrape(setup.status)
    assert after("kvern_gateway_open_streams") == 0
    duration = "kvern_gateway_request_duration_seconds_count"
    assert after(duration, route=CHAT) - before(duration, route=CHAT) == 5


async def test_models_are_listed(setup: Setup) -> None:
    answer = (await setup.client.get("/v1/models")).json()
    [model] = answer["data"]
    assert (answer["object"], model["id"], model["object"], model["owned_by"]) == ("list", "tiny", "model", "kvern")


async def test_health_and_readiness_follow_router(setup: Setup) -> None:
    assert (await setup.client.get("/health")).status_code == 200
    await scrape_until(setup.status, lambda now: now("kvern_ready") == 1)
    await setup.router.set_serving(False)
    assert (await setup.client.get("/health")).status_code == 503
    await scrape_until(setup.status, lambda now: now("kvern_ready") == 0)
    await setup.router.set_serving(True)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/none", 404), ("GET", CHAT, 405)])
async def test_unknown_path_or_method_is_an_error_in_openai_form(
    setup: Setup, method: str, path: str, status: int
) -> None:
    response = await setup.client.request(method, path)
    assert response.status_code == status
    assert path in response.json()["error"]["message"]
