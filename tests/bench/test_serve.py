"""The benchmark of servers sends all of them the same, and counts every token that comes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from serve import measure, summarize
from serve_targets import Answer, Arrival, Request, TargetFailed, open_target
from serve_workloads import WORKLOADS, Answers, ClosedLoop, Mixed
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvern.services.runtime.http_server import bind, serving
from tests.up_process import PATIENCE_S, UpProcess

CLOSED_LOOP = ClosedLoop(concurrency=2, num_requests=3, own_tokens=20, new_tokens=5, num_groups=2, shared_tokens=16)
MIXED = Mixed(
    ClosedLoop(concurrency=2, num_requests=2, own_tokens=20, new_tokens=12),
    num_long=2,
    long_tokens=100,
    interval_s=0.01,
    long_new_tokens=2,
)

CHUNKS = [("one", None), ("", None), ("two and three", None), ("four", "length")]
"""Text and reason to end of what the scripted server sends for five tokens. The second has no text of its own."""


class ScriptedServer:
    """Answers completions with CHUNKS, or with what a test puts in their place."""

    def __init__(self, num_together: int = 1) -> None:
        """num_together: how many answers must have begun before any goes on."""
        self._num_together = num_together
        self._are_together = asyncio.Event()
        self.bodies: list[dict] = []
        self.num_running = self.most_running = 0
        self.events: list[dict] = [
            {"choices": [{"index": 0, "text": text, "finish_reason": why}]} for text, why in CHUNKS
        ]
        self.events.append({"choices": [], "usage": {"completion_tokens": 5}})
        self.status = 200

    async def list_models(self, request: HttpRequest) -> Response:
        return JSONResponse({"data": [{"id": "scripted"}]})

    async def complete(self, request: HttpRequest) -> Response:
        self.bodies.append(await request.json())
        if self.status != 200:
            return JSONResponse({"error": "no such model"}, self.status)
        return StreamingResponse(self.stream(), media_type="text/event-stream")

    async def stream(self) -> AsyncIterator[str]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        if self.num_running == self._num_together:
            self._are_together.set()
        await asyncio.wait_for(self._are_together.wait(), PATIENCE_S)
        for event in self.events:
            yield f"data: {json.dumps(event)}\n\n"
            await asyncio.sleep(0)
        yield "data: [DONE]\n\n"
        self.num_running -= 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        routes = [Route("/v1/models", self.list_models), Route("/v1/completions", self.complete, methods=["POST"])]
        with bind("127.0.0.1:0") as listener:
            async with serving(Starlette(routes=routes), [listener], grace_s=5):
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("door", ["grpc", "http"])
def test_workload_on_a_real_set_counts_and_times_every_token(running_set: UpProcess, door: str) -> None:
    address = running_set.listen if door == "grpc" else running_set.http
    measured = measure(f"{door}://{address}", "prefix", 1, CLOSED_LOOP)
    assert measured.workload == "prefix"
    assert measured.tok_s > 0
    assert 0 < measured.ttft_p50 <= measured.ttft_p99
    assert 0 < measured.itl_p50 <= measured.itl_p99
    assert measured.long_ttft_p50 is None
    assert measured.tokens_per_chunk >= 1
    assert measured.client_us_per_token > 0


def test_mixed_workload_on_a_real_set_times_long_prompts_apart(running_set: UpProcess) -> None:
    measured = measure(f"grpc://{running_set.listen}", "mixed", 1, MIXED)
    assert measured.tok_s > 0
    assert measured.long_ttft_p50 is not None
    assert measured.long_ttft_p50 > 0


async def test_http_answer_with_chunks_of_several_tokens_counts_all() -> None:
    server = ScriptedServer()
    async with server.running() as url, open_target(url) as target:
        answers = [await target.answer(Request([7, 8, 9], 5)) for _ in range(2)]
    assert [arrival.num_tokens for arrival in answers[0].arrivals] == [1, 1, 1, 2]
    assert server.bodies[0] == server.bodies[1]
    assert server.bodies[0].items() >= {
        "model": "scripted", "prompt": [7, 8, 9], "max_tokens": 5, "temperature": 0, "ignore_eos": True, "stream": True
    }.items()  # fmt: skip


async def test_closed_loop_keeps_its_concurrency_and_sends_every_request() -> None:
    server = ScriptedServer(num_together=CLOSED_LOOP.concurrency)
    requests = CLOSED_LOOP.requests(random.Random(0))
    async with server.running() as url, open_target(url) as target:
        answers = await CLOSED_LOOP.run(target, requests)
    assert len(answers.streams) == CLOSED_LOOP.num_requests
    assert sorted(body["prompt"] for body in server.bodies) == sorted(list(request.token_ids) for request in requests)
    assert server.most_running == CLOSED_LOOP.concurrency


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": 404}, 'status 404: b\'{"error":"no such model"}\''),
        ({"events": [{"error": {"message": "out of memory"}}]}, "out of memory"),
        ({"events": [{"choices": [{"text": "one"}]}, object()]}, "the connection was closed after 1 chunks"),
        ({"events": [{"choices": [], "usage": {"completion_tokens": 5}}]}, "0 tokens came where 5 were asked for"),
    ],
    ids=["status", "error event", "cut off", "no tokens"],
)
async def test_http_answer_that_fails_says_what_came(change: dict, message: str) -> None:
    server = ScriptedServer()
    vars(server).update(change)
    async with server.running() as url, open_target(url) as target:
        with pytest.raises(TargetFailed) as failure:
            await target.answer(Request([7, 8, 9], 5))
    assert message in str(failure.value)


def test_requests_of_equal_seeds_are_equal_and_others_share_nothing() -> None:
    for workload in WORKLOADS.values():
        first, again, other = (workload.requests(random.Random(seed)) for seed in (1, 1, 2))
        assert first == again
        assert not {tuple(each.token_ids[:16]) for each in first} & {tuple(each.token_ids[:16]) for each in other}


def test_prompts_of_a_group_share_their_beginning_alone() -> None:
    prefix = WORKLOADS["prefix"]
    assert isinstance(prefix, ClosedLoop)
    prompts = [tuple(each.token_ids) for each in prefix.requests(random.Random(0))]
    assert len({prompt[:1000] for prompt in prompts}) == 8
    assert len({prompt[1000:] for prompt in prompts}) == 64
    assert {len(prompt) for prompt in prompts} == {1048}


def test_summary_shares_a_gap_among_tokens_that_came_together() -> None:
    answers = Answers(
        streams=[
            Answer(10.0, [Arrival(10.5, 1), Arrival(10.75, 1), Arrival(11.25, 2)]),
            Answer(10.0, [Arrival(11.5, 2), Arrival(12.0, 2)]),
        ],
        long=[Answer(11.0, [Arrival(13.0, 4)]), Answer(11.0, [Arrival(14.0, 4)])],
    )
    measured = summarize("mixed", answers, client_s=0.016)
    assert measured.tok_s == 4.0
    assert measured.ttft_p50 == 1.0
    assert measured.itl_p50 == measured.itl_p99 == 0.25
    assert measured.long_ttft_p50 == 2.5
    assert measured.tokens_per_chunk == 16 / 7
    assert measured.client_us_per_token == pytest.approx(1000)
