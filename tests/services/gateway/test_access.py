"""What is told of requests: one log line each, and metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.services.scraping import EVERY_SERVICE, scrape, scrape_until

from .scripted_router import STARTED, delta, finished, responds, stalls_after
from .setup import CHAT, COMPLETIONS, USER, Setup

pytestmark = pytest.mark.asyncio(loop_scope="package")

METRICS = EVERY_SERVICE | {
    "kvern_gateway_requests_total",
    "kvern_gateway_request_duration_seconds",
    "kvern_gateway_open_streams",
}
SECRET = "s3cret"


async def logged(setup: Setup, request_id: str) -> dict[str, Any]:
    """Wait for a request's line, the only one."""
    async with asyncio.timeout(10):
        while not (lines := [each for each in _access_lines(setup) if each["request_id"] == request_id]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    [line] = lines
    return line


def _access_lines(setup: Setup) -> list[dict[str, Any]]:
    whole_lines = setup.log.read_text().rpartition("\n")[0].splitlines()
    return [line for line in map(json.loads, whole_lines) if line["logger"] == "kvern.access"]


@pytest.mark.parametrize("stream", [False, True])
async def test_request_leaves_one_line_without_content(setup: Setup, stream: bool) -> None:
    setup.router.behaviour = responds(STARTED, delta(SECRET), finished())
    request_id = f"line-{stream}"
    body = {"messages": [{"role": "user", "content": SECRET}], "stream": stream, "user": SECRET}
    headers = {"Authorization": SECRET, "X-Request-Id": request_id, "User-Agent": SECRET}
    response = await setup.client.post(f"{CHAT}?key={SECRET}", json=body, headers=headers)
    line = await logged(setup, request_id)
    assert line.pop("duration_s") >= 0
    assert line.pop("timestamp")
    assert line == {
        "event": "request ended",
        "level": "info",
        "logger": "kvern.access",
        "service": "gateway",
        "request_id": request_id,
        "method": "POST",
        "route": CHAT,
        "status": 200,
        "prompt_tokens": 7,
        "completion_tokens": 2,
    }
    assert SECRET not in setup.log.read_text()
    assert response.headers["x-request-id"] == request_id


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_request_of_a_client_that_left_is_logged_as_that(setup: Setup, path: str) -> None:
    setup.router.behaviour = stalls_after(STARTED, delta("Hi", num_tokens=3))
    headers = {"X-Request-Id": f"left{path.replace('/', '.')}"}
    body = {"stream": True} | ({"messages": [USER]} if path == CHAT else {"prompt": "Hello"})
    async with setup.client.stream("POST", path, json=body, headers=headers) as response:
        async for line in response.aiter_lines():
            if "Hi" in line:
                break
    line = await logged(setup, headers["X-Request-Id"])
    assert setup.router.received[0].output.token_ids
    assert (line["status"], line["prompt_tokens"], line["completion_tokens"]) == (499, 7, 3)


async def test_method_that_the_client_made_up_is_not_logged(setup: Setup) -> None:
    await setup.client.request(SECRET.upper(), "/version", headers={"X-Request-Id": "made-up"})
    line = await logged(setup, "made-up")
    assert (line["method"], line["status"]) == ("other", 405)


async def test_request_that_names_no_id_gets_one(setup: Setup) -> None:
    response = await setup.client.get("/v1/models/none")
    line = await logged(setup, response.headers["x-request-id"])
    assert (line["route"], line["status"], line["prompt_tokens"]) == ("/v1/models/{model:path}", 404, None)


async def test_request_id_of_the_header_may_repeat_and_the_body_s_is_taken_as_it_is(setup: Setup) -> None:
    headers = {"X-Request-Id": "again"}
    for _ in range(2):
        await setup.client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
    ids = [request.request_id for request in setup.router.received]
    assert all(request_id.startswith("again-") for request_id in ids)
    assert ids[0] != ids[1]
    response = await setup.client.post(COMPLETIONS, json={"prompt": ["a", "b"], "request_id": "once"}, headers=headers)
    assert sorted(request.request_id for request in setup.router.received[2:]) == ["once-0", "once-1"]
    assert response.headers["x-request-id"] == "once"


@pytest.mark.parametrize("value", ["a b", "x" * 129, "a;b", "é".encode()])
async def test_request_id_of_another_form_is_refused(setup: Setup, value: str | bytes) -> None:
    response = await setup.client.get("/v1/models", headers={"X-Request-Id": value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Request-Id")
    assert response.headers["x-request-id"] != value


async def test_probes_are_not_logged(setup: Setup) -> None:
    for path in ("/health", "/metrics"):
        await setup.client.get(path, headers={"X-Request-Id": "probe"})
    await setup.client.get("/version", headers={"X-Request-Id": "after-probes"})
    await logged(setup, "after-probes")
    assert "probe" not in [line["request_id"] for line in _access_lines(setup)]


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
        await setup.client.get(f"/v1/made/up/{number}", headers={"X-Request-Id": f"id-{number}"})
    more = await counted(25)
    assert more(route="other", code="404") == more(route="other") == 20
    after = await scrape(setup.status)
    assert after("kvern_gateway_open_streams") == 0
    duration = "kvern_gateway_request_duration_seconds_count"
    assert after(duration, route=CHAT) - before(duration, route=CHAT) == 5
    assert len(after.samples) - len(before.samples) < 60


async def test_metrics_are_on_the_http_port_too(setup: Setup) -> None:
    answer = await setup.client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "kvern_gateway_open_streams" in answer.text
