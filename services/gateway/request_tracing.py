"""Middleware that traces requests of the API."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvern.services.gateway.access import method_of
from kvern.services.runtime.tracing import CARRIED, Carrier, Kind, Span, Tracer, serve_in


class RequestTracing:
    """Has a span for each request of some routes, from its headers to the end of its answer.

    The server runs each request as a task of its own.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer, routes: Collection[str]) -> None:
        self._app = app
        self._tracer = tracer
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._routes:
            await self._app(scope, receive, send)
            return
        method, route = method_of(scope), scope["path"]
        with self._tracer.begin(f"{method} {route}", Kind.SERVER, _carrier_of(scope)) as span:
            serve_in(span)
            span.set(
                {"http.request.method": method, "http.route": route, "url.path": route, "url.scheme": scope["scheme"]}
            )
            await self._app(scope, receive, _telling(span, send))


def _telling(span: Span, send: Send) -> Send:
    async def send_and_tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            status = message["status"]
            span.set({"http.response.status_code": status})
            if status >= 500:
                span.fail(str(status))
        await send(message)

    return send_and_tell


def _carrier_of(scope: Scope) -> Carrier:
    headers = ((key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"])
    return {key: value for key, value in headers if key in CARRIED}
