"""What a router process tells a collector of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
import pytest_asyncio

from kvern.services.runtime.errors import Unavailable
from kvern.v1 import inference_pb2, replica_pb2
from tests.collector import ERROR, QUICKLY, UNSET, ClientSpan, Collector, Trace, collecting, new_client_span

from . import scripted
from .conftest import starting
from .setup import MAX_STREAMS, Call, Setup

pytestmark = pytest.mark.asyncio(loop_scope="module")

GENERATE = "kvern.v1.InferenceService/Generate"
ENCODE = "kvern.v1.TokenizerService/EncodePrompt"
SERVE = "kvern.v1.ReplicaService/Serve"


@pytest.fixture(scope="module")
def collected() -> Iterator[tuple[Collector, str]]:
    with collecting() as collected:
        yield collected


@pytest.fixture(scope="module")
def collector(collected: tuple[Collector, str]) -> Collector:
    return collected[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(collected: tuple[Collector, str], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setup]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUICKLY.items():
            patch.setenv(name, value)
        async with starting(tmp_path_factory.mktemp("traced"), f"--otlp-endpoint={collected[1]}") as setup:
            yield setup


def generate(setup: Setup, client: ClientSpan) -> Call:
    request = inference_pb2.GenerateRequest(text="Hi", request_id=client.span_id)
    request.sampling.seed = 1
    return setup.inference.Generate(request, metadata=client.metadata, timeout=20)


async def come(collector: Collector, client: ClientSpan) -> Trace:
    return await asyncio.to_thread(collector.wait_for, client, lambda trace: GENERATE in trace.names())


async def test_request_has_one_trace_under_its_clients_span(setup: Setup, collector: Collector) -> None:
    client = new_client_span()
    assert [response async for response in generate(setup, client)]
    trace = await come(collector, client)
    assert [trace.path(trace.one("router", name)) for name in (ENCODE, SERVE)] == [
        [f"router:{GENERATE}", f"router:{ENCODE}"],
        [f"router:{GENERATE}", f"router:{SERVE}"],
    ]
    served = trace.one("router", GENERATE)
    assert served.span.parent_span_id.hex() == client.span_id
    assert served.attributes["kvern.request_id"] == client.span_id
    assert served.attributes["gen_ai.request.model"] == scripted.MODEL
    assert served.attributes["gen_ai.usage.input_tokens"] == 2
    assert served.attributes["kvern.replica"] == setup.chosen.address


async def test_each_replica_of_a_moved_stream_has_a_span_in_one_trace(setup: Setup, collector: Collector) -> None:
    async def break_once(request: inference_pb2.GenerateRequest) -> AsyncIterator[replica_pb2.ServeResponse]:
        setup.behave(scripted.answer)
        yield scripted.started(request)
        raise Unavailable("the engine is gone")

    setup.behave(break_once)
    client = new_client_span()
    assert [response async for response in generate(setup, client)]
    trace = await come(collector, client)
    first, second = sorted(trace.all("router", SERVE), key=lambda each: each.span.start_time_unix_nano)
    assert first.attributes["kvern.replica"] != second.attributes["kvern.replica"]
    assert (first.attributes["kvern.moved"], second.attributes["kvern.moved"]) == (False, True)
    assert (first.span.status.code, second.span.status.code) == (ERROR, UNSET)
    assert first.attributes["rpc.grpc.status_code"] == grpc.StatusCode.UNAVAILABLE.value[0]


async def test_fifty_abandoned_streams_end_their_spans_and_reach_the_replicas(
    setup: Setup, collector: Collector
) -> None:
    """H10, H13: tracing hides no cancellation, and says nothing."""
    setup.behave(scripted.stall_after_start)
    clients = [new_client_span() for _ in range(50)]
    for start in range(0, len(clients), MAX_STREAMS):
        calls = [generate(setup, client) for client in clients[start : start + MAX_STREAMS]]
        await asyncio.gather(*(call.read() for call in calls))
        for call in calls:
            call.cancel()
        await setup.all_ready()  # no request in flight
    for client in clients:
        trace = await come(collector, client)
        for name in (GENERATE, SERVE):
            span = trace.one("router", name)
            assert (span.attributes["rpc.grpc.status_code"], span.span.status.code) == (1, UNSET)
    log = setup.log.read_text()
    assert '"level": "error"' not in log
    assert "detach" not in log
    assert f'"trace_id": "{clients[0].trace_id}"' in log


async def test_trace_that_is_not_sampled_is_passed_on_and_sent_nowhere(setup: Setup, collector: Collector) -> None:
    off, on = new_client_span("00"), new_client_span()
    for client in (off, on):
        assert [response async for response in generate(setup, client)]
    await come(collector, on)
    assert not collector.trace(off).spans
