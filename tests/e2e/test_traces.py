"""One trace a request, over all processes of a set with an index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from kvern.client import AsyncClient, Delta, Started
from tests.collector import UNSET, ClientSpan, Collector, Seen, Trace, new_client_span
from tests.up_process import PATIENCE_S, UpProcess, wait_until

from .fleet import NO_HELP, NUM_REPLICAS, wait_ready

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTER = "router:kvern.v1.InferenceService/Generate"
CALL_TOKENIZER, TOKENIZER = (f"{name}:kvern.v1.TokenizerService/EncodePrompt" for name in ("router", "tokenizer"))
CALL_REPLICA, REPLICA = (f"{name}:kvern.v1.ReplicaService/Serve" for name in ("router", "detokenizer"))

HOPS = [
    [ROUTER],
    [ROUTER, "router:index lookup"],
    [ROUTER, CALL_TOKENIZER],
    [ROUTER, CALL_TOKENIZER, TOKENIZER],
    [ROUTER, CALL_TOKENIZER, TOKENIZER, "tokenizer:encode"],
    [ROUTER, CALL_REPLICA],
    [ROUTER, CALL_REPLICA, REPLICA],
    [ROUTER, CALL_REPLICA, REPLICA, "engine:queue"],
    [ROUTER, CALL_REPLICA, REPLICA, "engine:prefill"],
    [ROUTER, CALL_REPLICA, REPLICA, "engine:decode"],
]

# Longer than a block, so that there is something to look up.
PROMPT = "The mill by the river has two stones, and between them the grain becomes flour, a little finer each time."


@asynccontextmanager
async def calling(replicas: UpProcess, client: ClientSpan) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(replicas.listen, retry=NO_HELP, metadata=client.metadata) as connected:
        yield connected


async def come(collector: Collector, client: ClientSpan, is_enough: Callable[[Trace], bool]) -> Trace:
    return await asyncio.to_thread(collector.wait_for, client, is_enough)


def has_both_ends(trace: Trace) -> bool:
    """Whether the first span and the last one to be sent have come."""
    names = trace.names()
    return ROUTER.partition(":")[2] in names and ("decode" in names or "prefill" in names or "queue" in names)


def one(trace: Trace, hop: str) -> Seen:
    return trace.one(*hop.split(":"))


async def test_request_is_one_trace_over_all_hops(
    replicas: UpProcess, fleet_client: AsyncClient, collector: Collector
) -> None:
    """H09, H11."""
    await wait_ready(fleet_client)
    span = new_client_span()
    async with calling(replicas, span) as client:
        started, *_ = [event async for event in client.generate(PROMPT, max_tokens=5, n=3, ignore_eos=True, seed=1)]
    assert isinstance(started, Started)
    trace = await come(collector, span, lambda trace: len(trace.spans) >= len(HOPS))
    assert sorted(trace.path(each) for each in trace.spans) == sorted(HOPS)
    router, replica, decode = one(trace, ROUTER), one(trace, REPLICA), one(trace, "engine:decode")
    assert router.span.parent_span_id.hex() == span.span_id
    assert replica.attributes["kvern.request_id"] == router.attributes["kvern.request_id"] == started.request_id
    assert replica.attributes["gen_ai.request.max_tokens"] == 5
    assert replica.attributes["gen_ai.usage.output_tokens"] == router.attributes["gen_ai.usage.output_tokens"] == 15
    assert replica.events == ["first_token"]
    assert len(decode.attributes["gen_ai.response.finish_reasons"].values) == 3  # type: ignore[attr-defined]
    assert decode.attributes["gen_ai.request.choice.count"] == 3
    lookup = one(trace, "router:index lookup")
    assert lookup.attributes["db.system.name"] == "redis"
    assert lookup.attributes["kvern.num_digests"]
    prefill = one(trace, "engine:prefill").span
    assert prefill.end_time_unix_nano <= decode.span.start_time_unix_nano < decode.span.end_time_unix_nano
    # Nothing of what was asked or answered.
    assert all(b"mill" not in each.span.SerializeToString() for each in trace.spans)


async def test_gateway_goes_on_with_its_clients_trace(
    replicas: UpProcess, fleet_client: AsyncClient, collector: Collector
) -> None:
    await wait_ready(fleet_client)
    span = new_client_span()
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": True}
    async with httpx.AsyncClient(base_url=f"http://{replicas.http}", timeout=PATIENCE_S) as client:
        answer = await client.post("/v1/chat/completions", json=body, headers=dict(span.metadata))
    assert answer.status_code == 200
    trace = await come(collector, span, lambda trace: "POST /v1/chat/completions" in trace.names())
    http = trace.one("gateway", "POST /v1/chat/completions")
    assert http.span.parent_span_id.hex() == span.span_id
    assert http.attributes["http.response.status_code"] == 200
    assert trace.path(one(trace, ROUTER)) == ["gateway:POST /v1/chat/completions", ROUTER]


async def test_fifty_abandoned_streams_free_their_blocks_and_end_their_spans(
    replicas: UpProcess, fleet_client: AsyncClient, collector: Collector
) -> None:
    """H10, H13."""
    await wait_ready(fleet_client)
    spans = [new_client_span() for _ in range(50)]
    said_before = len(replicas.output)

    async def abandon(span: ClientSpan) -> None:
        async with calling(replicas, span) as client:
            async for event in client.generate(PROMPT, ignore_eos=True):
                if isinstance(event, Delta):
                    break

    await asyncio.gather(*map(abandon, spans))
    for index in range(NUM_REPLICAS):
        wait_until(lambda index=index: not replicas.load(index).num_used_blocks, "all blocks free")  # type: ignore[misc]
    for span in spans:
        trace = await come(collector, span, has_both_ends)
        assert one(trace, ROUTER).attributes["rpc.grpc.status_code"] == 1
        assert {each.span.status.code for each in trace.spans} == {UNSET}
    said = replicas.output[said_before:]
    assert "error" not in said
    assert "detach" not in said


async def test_trace_that_is_not_sampled_is_seen_nowhere(
    replicas: UpProcess, fleet_client: AsyncClient, collector: Collector
) -> None:
    await wait_ready(fleet_client)
    off, on = new_client_span("00"), new_client_span()
    for span in (off, on):
        async with calling(replicas, span) as client:
            assert [event async for event in client.generate(PROMPT, max_tokens=2)]
    await come(collector, on, has_both_ends)
    assert not collector.trace(off).spans
