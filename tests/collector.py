"""A collector of traces, as services see one: an OTLP endpoint over gRPC."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import token_hex

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.up_process import wait_until

QUICKLY = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
"""Variables of a service that sends its spans soon, in milliseconds."""

ERROR = Status.STATUS_CODE_ERROR
UNSET = Status.STATUS_CODE_UNSET


@dataclass(frozen=True)
class Seen:
    """A span as it came."""

    service: str
    span: Span

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def attributes(self) -> dict[str, object]:
        values = {each.key: each.value for each in self.span.attributes}
        return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}

    @property
    def events(self) -> list[str]:
        return [event.name for event in self.span.events]


class Trace:
    """The spans of one trace."""

    def __init__(self, spans: list[Seen], parent_id: bytes) -> None:
        """parent_id: of the client's own span, which nobody sends here."""
        self.spans = spans
        self._by_id = {each.span.span_id: each for each in spans}
        self._parent_id = parent_id

    @property
    def is_whole(self) -> bool:
        """Whether every span that others hang from has ended."""
        parents = {each.span.parent_span_id for each in self.spans}
        return bool(self.spans) and parents <= self._by_id.keys() | {self._parent_id}

    def names(self) -> list[str]:
        return [each.name for each in self.spans]

    def one(self, service: str, name: str) -> Seen:
        [found] = self.all(service, name)
        return found

    def all(self, service: str, name: str) -> list[Seen]:
        return [each for each in self.spans if (each.service, each.name) == (f"kvern-{service}", name)]

    def path(self, seen: Seen) -> list[str]:
        """Return `service:name` of a span and those that it is in, from the outermost on."""
        path = [f"{seen.service.removeprefix('kvern-')}:{seen.name}"]
        parent = self._by_id.get(seen.span.parent_span_id)
        return path if parent is None else [*self.path(parent), *path]


@dataclass(frozen=True)
class ClientSpan:
    """What a client says of the span from which it calls."""

    trace_id: str
    span_id: str
    flags: str = "01"

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("traceparent", self.traceparent),)


def new_client_span(flags: str = "01") -> ClientSpan:
    return ClientSpan(token_hex(16), token_hex(8), flags)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent, by trace."""

    def __init__(self) -> None:
        self._spans: dict[str, list[Seen]] = defaultdict(list)
        self.resources: dict[str, dict[str, str]] = {}
        """Attributes of each service's process."""

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for of_process in request.resource_spans:
            resource = {each.key: each.value.string_value for each in of_process.resource.attributes}
            service = resource["service.name"]
            self.resources[service] = resource
            for scope in of_process.scope_spans:
                for span in scope.spans:
                    self._spans[span.trace_id.hex()].append(Seen(service, span))
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def trace_ids(self) -> list[str]:
        return list(self._spans)

    def trace(self, of: ClientSpan | str) -> Trace:
        """Return what has come so far of a client's trace, or of the one with an id."""
        if isinstance(of, str):
            return Trace(list(self._spans.get(of, ())), b"")
        return Trace(list(self._spans.get(of.trace_id, ())), bytes.fromhex(of.span_id))

    def wait_for(self, of: ClientSpan, is_enough: Callable[[Trace], bool]) -> Trace:
        """Wait until a trace is whole and has what a test needs; return it."""

        def has_come() -> bool:
            trace = self.trace(of)
            return trace.is_whole and is_enough(trace)

        wait_until(has_come, "a whole trace")
        return self.trace(of)


@contextmanager
def collecting(
    address: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None
) -> Iterator[tuple[Collector, str]]:
    """Yield a collector and its endpoint."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    if credentials is None:
        scheme, port = "http", server.add_insecure_port(address)
    else:
        scheme, port = "https", server.add_secure_port(address, credentials)
    server.start()
    try:
        yield collector, f"{scheme}://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()
