"""Middleware around all requests: each has an id, is counted, and leaves one log line when it ends."""

from __future__ import annotations

import re
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPMethod

import structlog
from prometheus_client import Gauge
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvern.services.gateway.errors import ApiError
from kvern.services.gateway.event_stream import EventStream
from kvern.services.gateway.metrics import CLIENT_GONE, FAULT, GatewayMetrics
from kvern.services.gateway.usage import Tally
from kvern.services.runtime.metrics import OTHER

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID_PATTERN = "[A-Za-z0-9._-]{1,128}"
"""It stands in logs, headers and other services' tables."""

_METHODS = frozenset(HTTPMethod)
"""Others are words of the client, of any length."""

_log = structlog.get_logger("kvern.access")


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request, for its log line."""

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_clients: bool = False
    """Whether the client chose the id. Proxies repeat theirs when they try again."""
    tally: Tally | None = None
    """Where it generates."""

    @property
    def unique_id(self) -> str:
        """An id that no other request in flight has."""
        return f"{self.request_id}-{secrets.token_hex(4)}" if self.is_clients else self.request_id


def method_of(scope: Scope) -> str:
    """Return a request's method, or OTHER."""
    return scope["method"] if scope["method"] in _METHODS else OTHER


def record_of(request: Request) -> RequestRecord:
    """Return the record of a request that came through Access."""
    record: RequestRecord = request.state.record
    return record


class Access:
    """Counts and logs requests, outside of all that may fail. Probes are logged as debug messages.

    Answers of a gateway that drains end their connections, or clients would send the next request into their close.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: GatewayMetrics,
        routes: Sequence[Route],
        probes: frozenset[str],
        is_draining: Callable[[], bool],
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes
        self._probes = probes
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = RequestRecord()
        scope.setdefault("state", {})["record"] = record
        answer = _Answer(record, send, self._metrics.open_streams, self._is_draining)
        started_at = time.monotonic()
        try:
            _name(record, scope)
            await self._app(scope, receive, answer.send)
        except ApiError as error:
            await error.response(scope, receive, answer.send)
        except Exception:
            answer.code = FAULT  # who catches it answers so
            raise
        finally:
            answer.close()
            self._tell(record, scope, answer.code, time.monotonic() - started_at)

    def _tell(self, record: RequestRecord, scope: Scope, code: int, duration_s: float) -> None:
        matching = (route.path for route in self._routes if route.matches(scope)[0] is not Match.NONE)
        route = next(matching, OTHER)
        self._metrics.count(route, code, duration_s)
        log = _log.debug if route in self._probes else _log.info
        log(
            "request ended",
            request_id=record.request_id,
            method=method_of(scope),
            route=route,
            status=code,
            duration_s=round(duration_s, 4),
            prompt_tokens=None if record.tally is None else record.tally.prompt_tokens,
            completion_tokens=None if record.tally is None else record.tally.completion_tokens,
        )


def _name(record: RequestRecord, scope: Scope) -> None:
    """Name a request as its header says. Raises ApiError."""
    for value in Headers(scope=scope).getlist(REQUEST_ID_HEADER):
        if re.fullmatch(REQUEST_ID_PATTERN, value) is None:
            raise ApiError(400, f"X-Request-Id: must match {REQUEST_ID_PATTERN}", "X-Request-Id", "invalid_value")
        record.request_id, record.is_clients = value, True


class _Answer:
    """One answer on its way to the client."""

    def __init__(self, record: RequestRecord, send: Send, open_streams: Gauge, is_draining: Callable[[], bool]) -> None:
        self.code = CLIENT_GONE
        self._record = record
        self._send = send
        self._open_streams = open_streams
        self._is_draining = is_draining
        self._status = CLIENT_GONE
        self._is_stream = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._is_stream = Headers(raw=message["headers"]).get("content-type", "").startswith(EventStream.media_type)
            self._open_streams.inc(self._is_stream)
            message = {**message, "headers": [*message["headers"], *self._headers]}
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.code = self._status

    @property
    def _headers(self) -> list[tuple[bytes, bytes]]:
        request_id = (REQUEST_ID_HEADER.encode(), self._record.request_id.encode())
        return [request_id, (b"connection", b"close")] if self._is_draining() else [request_id]

    def close(self) -> None:
        self._open_streams.dec(self._is_stream)
