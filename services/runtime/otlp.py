"""Spans by OpenTelemetry's SDK, sent to a collector by OTLP over gRPC. Imported only where that is wanted.

What OTEL_ variables say of headers, certificates, time limits, queues and further attributes of the process holds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import grpc
import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider, sampling
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span as SdkSpan
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace import Tracer as SdkTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvern.services.runtime.interceptors import code_of
from kvern.services.runtime.tls import ClientTls
from kvern.services.runtime.tracing import Attributes, Carrier, Kind
from kvern.version import __version__

CLOSE_S = 2.0
"""How long the last spans may take on their way to the collector when the process ends."""

MAX_BATCH = 64
"""Spans in one message. Encoding takes 35 us a span, in which the thread that serves requests has to wait."""

_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""What makes a served call an error by OpenTelemetry's conventions: other codes are the caller's doing."""

_NO_FAULTS = frozenset({grpc.StatusCode.OK, grpc.StatusCode.CANCELLED})
"""What does not make a call an error where it is made."""

_CERTIFICATE_VARIABLES = frozenset({"OTEL_EXPORTER_OTLP_CERTIFICATE", "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE"})
"""Read by the exporter itself, at its start."""

_PROPAGATOR = TraceContextTextMapPropagator()

_log = structlog.get_logger("kvern.tracing")


class OtlpTracer:
    """Begins spans, and sends them from a thread of its own. A collector that is away costs spans, no more."""

    is_on = True

    def __init__(self, service: str, endpoint: str, sample_ratio: float, tls: ClientTls | None = None) -> None:
        """sample_ratio: of the requests that come without a trace. A trace's own word counts before it.
        tls: whom to trust at an https:// endpoint, unless OTEL_ variables say; None: whom the system trusts.
        """
        # They say each failed try. One line when the collector goes and one when it is back is enough.
        for name in ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._exporter = _Exporter(endpoint, tls)
        self._processor = BatchSpanProcessor(self._exporter, max_export_batch_size=_batch_size())
        provider = TracerProvider(
            sampler=sampling.ParentBasedTraceIdRatio(sample_ratio),
            resource=_resource(service),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("kvern", __version__)

    def begin(self, name: str, kind: Kind, carrier: Carrier) -> OtlpSpan:
        parent = _PROPAGATOR.extract(carrier, Context())
        return OtlpSpan(self._tracer, self._tracer.start_span(name, parent, SpanKind[kind.name]), kind)

    def serve(self, method: str, carrier: Carrier) -> OtlpSpan:
        span = self.begin(method, Kind.SERVER, carrier)
        span.describe_call(method)
        return span

    async def close(self) -> None:
        """Send what is left. It takes CLOSE_S at most: then the exporter is closed, and all that waits for it fails."""
        cut = asyncio.get_running_loop().call_later(CLOSE_S, self._exporter.shutdown)
        try:
            await asyncio.to_thread(self._processor.shutdown)
        finally:
            cut.cancel()


class OtlpSpan:
    """A span of the SDK."""

    def __init__(self, tracer: SdkTracer, span: SdkSpan, kind: Kind) -> None:
        self._tracer = tracer
        self._span = span
        self._kind = kind
        self._is_call = False

    @property
    def is_recording(self) -> bool:
        return self._span.is_recording()

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def traceparent(self) -> str:
        return self._carrier().get("traceparent", "")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._carrier().items())

    def child(self, name: str, kind: Kind = Kind.INTERNAL) -> OtlpSpan:
        if not self._span.get_span_context().trace_flags.sampled:
            return self
        parent = set_span_in_context(self._span, Context())
        span = self._tracer.start_span(name, parent, SpanKind[kind.name])
        return OtlpSpan(self._tracer, span, kind)

    def call(self, method: str) -> OtlpSpan:
        span = self.child(method, Kind.CLIENT)
        span.describe_call(method)
        return span

    def describe_call(self, method: str) -> None:
        service, _, name = method.partition("/")
        self._is_call = True
        self.set({"rpc.system": "grpc", "rpc.service": service, "rpc.method": name})

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def add_event(self, name: str) -> None:
        self._span.add_event(name)

    def fail(self, error_type: str) -> None:
        self.set({"error.type": error_type})
        self._span.set_status(StatusCode.ERROR)

    def end(self, code: grpc.StatusCode | None = None) -> None:
        if code is not None:
            self._set_code(code)
        self._span.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        code = grpc.StatusCode.OK if exc is None else code_of(exc)
        if self._is_call:
            self._set_code(code)
        elif self._is_fault(code):
            self.fail(type(exc).__name__)
        self._span.end()

    def _set_code(self, code: grpc.StatusCode) -> None:
        self.set({"rpc.grpc.status_code": code.value[0]})
        if self._is_fault(code):
            self.fail(code.name)

    def _is_fault(self, code: grpc.StatusCode) -> bool:
        return code not in _NO_FAULTS if self._kind is Kind.CLIENT else code in _FAULTS

    def _carrier(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(self._span, Context()))
        return carrier


class _Exporter(SpanExporter):
    """Says once that the collector is away, and once that it is back. Connects anew when certificates have changed."""

    def __init__(self, endpoint: str, tls: ClientTls | None) -> None:
        self._endpoint = endpoint
        self._tls = None if _CERTIFICATE_VARIABLES & os.environ.keys() else tls
        self._credentials = self._latest_credentials()
        self._exporter = self._connect()
        self._is_away = False
        self._is_closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if (credentials := self._latest_credentials()) is not self._credentials and not self._is_closed:
            self._exporter.shutdown()
            self._credentials = credentials
            self._exporter = self._connect()
        result = self._exporter.export(spans)
        is_away = result is not SpanExportResult.SUCCESS
        if is_away and not self._is_away:
            _log.warning("the collector of traces does not answer")
        elif self._is_away and not is_away:
            _log.info("the collector of traces answers again")
        self._is_away = is_away
        return result

    def shutdown(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._exporter.shutdown()

    def _latest_credentials(self) -> grpc.ChannelCredentials | None:
        return None if self._tls is None else self._tls.credentials()

    def _connect(self) -> OTLPSpanExporter:
        return OTLPSpanExporter(endpoint=self._endpoint, credentials=self._credentials)


def _batch_size() -> int | None:
    return None if "OTEL_BSP_MAX_EXPORT_BATCH_SIZE" in os.environ else MAX_BATCH


def _resource(service: str) -> Resource:
    # Several processes of a service share a host where there are no pods.
    host = socket.gethostname()
    return Resource.create(
        {
            "service.namespace": "kvern",
            "service.name": f"kvern-{service}",
            "service.version": __version__,
            "service.instance.id": f"{host}-{os.getpid()}",
            "host.name": host,
        }
    )
