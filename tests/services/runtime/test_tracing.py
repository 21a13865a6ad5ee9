"""Spans on their way to a real collector, from real calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from kvern.services.router.settings import RouterSettings
from kvern.services.runtime import errors, otlp
from kvern.services.runtime.call_spans import SpanInterceptor
from kvern.services.runtime.channel import open_channel
from kvern.services.runtime.interceptors import ErrorInterceptor
from kvern.services.runtime.otlp import OtlpTracer
from kvern.services.runtime.settings import SettingsError
from kvern.services.runtime.tls import ClientTls, KeyPair
from kvern.services.runtime.tracing import NO_SPAN, Kind, Tracer, current_span
from kvern.v1 import inference_pb2, inference_pb2_grpc, replica_pb2, replica_pb2_grpc
from tests.collector import ERROR, QUICKLY, UNSET, Collector, Seen, collecting, new_client_span
from tests.for_ever import for_ever
from tests.services.certificates import Authority
from tests.up_process import PATIENCE_S, free_port, wait_until

GENERATE = "kvern.v1.InferenceService/Generate"

SDK_PATIENCE_S = 30.0
"""How long OpenTelemetry itself would wait for its thread when it is closed."""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUICKLY.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(otlp, "CLOSE_S", PATIENCE_S)


@pytest.fixture
def collected() -> Iterator[tuple[Collector, str]]:
    with collecting() as collected:
        yield collected


@asynccontextmanager
async def tracer_to(endpoint: str, ratio: float = 1.0, tls: ClientTls | None = None) -> AsyncIterator[OtlpTracer]:
    tracer = OtlpTracer("test", endpoint, ratio, tls)
    try:
        yield tracer
    finally:
        await tracer.close()


class Peer(inference_pb2_grpc.InferenceServiceServicer, replica_pb2_grpc.ReplicaServiceServicer):
    """A handler that does what the test says, with the span it finds."""

    def __init__(self, behave: Callable[[], Awaitable[object]]) -> None:
        self._behave = behave
        self.span = NO_SPAN
        self.error: BaseException | None = None
        self.begun: asyncio.Queue[None] = asyncio.Queue()
        """One item for each call that has told its first message."""
        self.ended = asyncio.Event()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.span = current_span()
        try:
            yield inference_pb2.GenerateResponse()
            with current_span().child("inner"):
                self.begun.put_nowait(None)
                await self._behave()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.ended.set()

    async def GetReplicaInfo(
        self, request: replica_pb2.GetReplicaInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> replica_pb2.GetReplicaInfoResponse:
        self.span = current_span()
        return replica_pb2.GetReplicaInfoResponse()


@asynccontextmanager
async def serving(peer: Peer, tracer: Tracer, folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[SpanInterceptor(tracer), ErrorInterceptor()])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(peer, server)
    replica_pb2_grpc.add_ReplicaServiceServicer_to_server(peer, server)
    server.add_insecure_port(address := f"unix:{folder}/peer.sock")
    await server.start()
    async with open_channel(address) as channel:
        yield channel
    await server.stop(0)


def generate(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    return stub.Generate(inference_pb2.GenerateRequest(), metadata=metadata, timeout=PATIENCE_S)


async def end_of(call: Any) -> grpc.StatusCode:
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    code: grpc.StatusCode = await call.code()
    return code


def all_spans(collector: Collector) -> list[Seen]:
    return [seen for trace_id in collector.trace_ids for seen in collector.trace(trace_id).spans]


async def come(collector: Collector, count: int) -> list[Seen]:
    """Wait until so many spans have come: that of a call may end after its client has seen the call's end."""
    await asyncio.to_thread(wait_until, lambda: len(all_spans(collector)) >= count, f"{count} spans have come")
    return all_spans(collector)


@pytest.mark.parametrize(("ratio", "flags", "is_traced"), [(0.0, "01", True), (1.0, "00", False), (0.0, "00", False)])
async def test_trace_of_the_caller_decides_whatever_the_ratio(
    collected: tuple[Collector, str], ratio: float, flags: str, is_traced: bool
) -> None:
    collector, endpoint = collected
    client = new_client_span(flags)
    async with tracer_to(endpoint, ratio) as tracer:
        span = tracer.begin("a", Kind.SERVER, {"traceparent": client.traceparent, "tracestate": "vendor=1"})
        child = span.child("b")
        assert child.is_recording == is_traced
        assert child.traceparent.startswith(f"00-{client.trace_id}-")
        assert child.traceparent.endswith(f"-{flags}")
        assert dict(child.metadata)["tracestate"] == "vendor=1"
        child.end()
        span.end()
    assert collector.trace(client).names() == (["b", "a"] if is_traced else [])


@pytest.mark.parametrize("traceparent", ["", "00-0-0-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\x00" * 5000])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
async def test_requests_without_a_trace_are_sampled_by_the_ratio(
    collected: tuple[Collector, str], ratio: float, traceparent: str
) -> None:
    collector, endpoint = collected
    async with tracer_to(endpoint, ratio) as tracer:
        with tracer.begin("a", Kind.SERVER, {"traceparent": traceparent}) as span:
            assert span.is_recording == bool(ratio)
    assert len(collector.trace_ids) == ratio


async def test_process_and_variables_describe_the_resource(
    collected: tuple[Collector, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    collector, endpoint = collected
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=pod-1")
    async with tracer_to(endpoint) as tracer:
        tracer.begin("a", Kind.SERVER, {}).end()
    resource = collector.resources["kvern-test"]
    assert resource["k8s.pod.name"] == "pod-1"
    assert resource["service.version"]
    assert resource["service.instance.id"]


async def test_cancelled_call_sees_its_cancellation_and_is_no_error(
    collected: tuple[Collector, str], tmp_path: Path
) -> None:
    """H10: with tracing on, what a client cancels is cancelled."""
    collector, endpoint = collected
    client = new_client_span()
    async with tracer_to(endpoint) as tracer:
        peer = Peer(for_ever)
        async with serving(peer, tracer, tmp_path) as channel:
            call = generate(channel, client.metadata)
            await call.read()
            await peer.begun.get()
            call.cancel()
            async with asyncio.timeout(PATIENCE_S):
                await peer.ended.wait()
        assert isinstance(peer.error, asyncio.CancelledError)
    trace = collector.trace(client)
    span = trace.one("test", GENERATE)
    assert span.span.parent_span_id.hex() == client.span_id
    assert (span.attributes["rpc.grpc.status_code"], span.span.status.code) == (1, UNSET)
    assert trace.one("test", "inner").span.status.code == UNSET


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (errors.InvalidArgument("text", "SECRET"), grpc.StatusCode.INVALID_ARGUMENT, UNSET),
        (errors.Unavailable("SECRET"), grpc.StatusCode.UNAVAILABLE, ERROR),
        (ValueError("SECRET"), grpc.StatusCode.INTERNAL, ERROR),
    ],
)
async def test_span_has_the_status_its_client_saw_and_no_message(
    collected: tuple[Collector, str], tmp_path: Path, error: Exception, code: grpc.StatusCode, status: int
) -> None:
    collector, endpoint = collected

    async def fail() -> None:
        raise error

    async with tracer_to(endpoint) as tracer, serving(Peer(fail), tracer, tmp_path) as channel:
        assert await end_of(generate(channel)) is code
        [inner, span] = await come(collector, 2)
    assert (span.attributes["rpc.grpc.status_code"], span.span.status.code) == (code.value[0], status)
    assert inner.span.status.code == status
    assert b"SECRET" not in span.span.SerializeToString() + inner.span.SerializeToString()


async def test_fifty_abandoned_streams_end_their_spans_without_a_word(
    collected: tuple[Collector, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """H13."""
    collector, endpoint = collected
    peer = Peer(for_ever)
    async with tracer_to(endpoint) as tracer:
        async with serving(peer, tracer, tmp_path) as channel:
            for _ in range(50):
                await generate(channel).read()
                await peer.begun.get()
        spans = await come(collector, 100)
    assert len(spans) == 100
    assert {span.attributes["rpc.grpc.status_code"] for span in spans if span.name == GENERATE} == {1}
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_polls_begin_no_trace_and_go_on_with_one(collected: tuple[Collector, str], tmp_path: Path) -> None:
    collector, endpoint = collected
    client = new_client_span()
    peer = Peer(for_ever)
    async with tracer_to(endpoint) as tracer, serving(peer, tracer, tmp_path) as channel:
        stub = replica_pb2_grpc.ReplicaServiceStub(channel)
        await stub.GetReplicaInfo(replica_pb2.GetReplicaInfoRequest())
        assert peer.span is NO_SPAN
        await stub.GetReplicaInfo(replica_pb2.GetReplicaInfoRequest(), metadata=client.metadata)
    assert collector.trace_ids == [client.trace_id]


async def test_log_lines_of_a_call_carry_its_trace(collected: tuple[Collector, str], tmp_path: Path) -> None:
    client = new_client_span()

    async def log() -> None:
        structlog.get_logger().info("said")

    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
        async with tracer_to(collected[1]) as tracer, serving(Peer(log), tracer, tmp_path) as channel:
            await end_of(generate(channel, client.metadata))
    assert [line["trace_id"] for line in logs if line["event"] == "said"] == [client.trace_id]


async def test_collector_that_is_away_is_told_of_once_and_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "CLOSE_S", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    address = f"127.0.0.1:{free_port()}"
    with structlog.testing.capture_logs() as logs:
        async with tracer_to(f"http://{address}") as tracer:
            for _ in range(3):
                tracer.begin("a", Kind.SERVER, {}).end()
            await asyncio.to_thread(wait_until, lambda: bool(logs), "the collector is found away")

            def is_found() -> bool:
                tracer.begin("b", Kind.SERVER, {}).end()
                return len(logs) > 1

            with collecting(address) as (collector, _):
                await asyncio.to_thread(wait_until, is_found, "the collector is found back")
                assert collector.trace_ids
            for _ in range(100):
                tracer.begin("c", Kind.SERVER, {}).end()
            async with asyncio.timeout(SDK_PATIENCE_S / 2):
                await tracer.close()
    told = [line["event"].split()[-1] for line in logs]
    assert told[:2] == ["answer", "again"]
    assert all(one != next_one for one, next_one in pairwise(told))


async def test_spans_go_to_a_collector_in_tls_with_the_certificate_of_the_moment(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    server, own = authority.sign("collector"), other.sign("own")
    keys = [(server.key.read_bytes(), server.certificate.read_bytes())]
    credentials = grpc.ssl_server_credentials(keys, authority.file.read_bytes(), True)
    tls = ClientTls(authority.file, KeyPair(own.certificate, own.key))
    with collecting(credentials=credentials) as (collector, endpoint):
        async with tracer_to(endpoint, tls=tls) as tracer:
            own.replace_by(authority.sign("rotated"))
            tracer.begin("a", Kind.SERVER, {}).end()
        assert len(collector.trace_ids) == 1


def test_services_without_a_collector_do_not_import_the_tracer() -> None:
    """redis-py imports OpenTelemetry's metrics where it finds them, so the router has some of it in any case."""
    code = (
        "import sys\n"
        "import kvern.services.router.__main__, kvern.services.gateway.__main__, kvern.services.engine.request_spans\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = done.stdout.split()
    assert "kvern.services.runtime.tracing" in imported
    assert [name for name in imported if name.startswith(("opentelemetry.sdk.trace", "opentelemetry.exporter"))] == []


@pytest.mark.parametrize("endpoint", ["collector:4317", "grpc://collector:4317", "http://"])
def test_endpoint_that_is_no_url_is_refused_by_name(endpoint: str) -> None:
    flags = ["--listen=a:1", "--tokenizer=b:1", "--replicas=c:1", f"--otlp-endpoint={endpoint}"]
    with pytest.raises(SettingsError, match="otlp_endpoint"):
        RouterSettings.load(flags, prog="router", environ={})
