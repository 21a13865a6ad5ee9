"""Spans of a request: what it waited for, and where. Without a collector OpenTelemetry is not even imported.

Spans are passed on by hand, or found by `current_span` in the task that serves a call. Nothing is ever detached from a
context, so it does not matter in which one an abandoned generator is closed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from enum import Enum
from types import TracebackType
from typing import Protocol, Self

import grpc
import structlog

from kvern.services.runtime.settings import ServiceSettings
from kvern.services.runtime.tls import client_tls

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]
"""Of a span. Named as OpenTelemetry does, where it has a name; never a prompt or its tokens."""

Carrier = Mapping[str, str]
"""Headers `traceparent` and `tracestate` of a call, as far as it had them."""

CARRIED = frozenset({"traceparent", "tracestate"})


class Kind(Enum):
    """Which end of a call a span is, if any."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"


class Span(Protocol):
    """A piece of a trace. Leaving its block ends it, and tells what the block raised."""

    @property
    def is_recording(self) -> bool:
        """Whether anybody will see it: if not, there is no need to find out what to `set`."""
        ...

    @property
    def trace_id(self) -> str:
        """32 hex digits, nothing where there is no trace."""
        ...

    @property
    def traceparent(self) -> str:
        """What makes a span elsewhere a child of this one; nothing where there is no trace."""
        ...

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The same, to be sent with a call."""
        ...

    def child(self, name: str, kind: Kind = Kind.INTERNAL) -> Span:
        """Begin a piece of this one."""
        ...

    def call(self, method: str) -> Span:
        """Begin a call to another service. method: `package.Service/Method`."""
        ...

    def set(self, attributes: Attributes) -> None: ...

    def add_event(self, name: str) -> None:
        """Note what happens now."""
        ...

    def fail(self, error_type: str) -> None:
        """Make it an error. error_type: its kind; messages may quote what a user wrote."""
        ...

    def end(self, code: grpc.StatusCode | None = None) -> None:
        """End it. code: what came of the call, where it is one."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Tracer(Protocol):
    """Begins what this process adds to traces."""

    is_on: bool

    def begin(self, name: str, kind: Kind, carrier: Carrier) -> Span:
        """Begin a span under the one that the headers name, or a trace of its own."""
        ...

    def serve(self, method: str, carrier: Carrier) -> Span:
        """Begin to serve a call. method: `package.Service/Method`."""
        ...


class _NoSpan:
    """All spans while tracing is off."""

    is_recording = False
    trace_id = ""
    traceparent = ""
    metadata = ()

    def child(self, name: str, kind: Kind = Kind.INTERNAL) -> Span:
        return self

    def call(self, method: str) -> Span:
        return self

    def set(self, attributes: Attributes) -> None:
        pass

    def add_event(self, name: str) -> None:
        pass

    def fail(self, error_type: str) -> None:
        pass

    def end(self, code: grpc.StatusCode | None = None) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


NO_SPAN: Span = _NoSpan()


class _NoTracer:
    is_on = False

    def begin(self, name: str, kind: Kind, carrier: Carrier) -> Span:
        return NO_SPAN

    def serve(self, method: str, carrier: Carrier) -> Span:
        return NO_SPAN


NO_TRACER: Tracer = _NoTracer()

_current: ContextVar[Span] = ContextVar("current_span", default=NO_SPAN)


def current_span() -> Span:
    """Return the span of the call that this task serves, or was started for."""
    return _current.get()


def serve_in(span: Span) -> None:
    """Make a span the current one for the rest of this task, which must be of one call alone. So must its log lines."""
    _current.set(span)
    structlog.contextvars.bind_contextvars(trace_id=span.trace_id)


@asynccontextmanager
async def tracing(service: str, settings: ServiceSettings) -> AsyncIterator[Tracer]:
    """Yield what begins spans. At the end those that no collector has yet are sent, if that is quick."""
    if settings.otlp_endpoint is None:
        yield NO_TRACER
        return
    from kvern.services.runtime.otlp import OtlpTracer

    tracer = OtlpTracer(service, settings.otlp_endpoint, settings.trace_sample_ratio, client_tls(settings))
    try:
        yield tracer
    finally:
        await tracer.close()
