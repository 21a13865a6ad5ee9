"""What a process tells over HTTP of how it is: /metrics, /healthz and /readyz.

Kubelet probes these rather than gRPC's health service: it can dial neither a Unix socket nor gRPC in TLS.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prometheus_client import Gauge
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvern.services.runtime.http_server import bind, serving
from kvern.services.runtime.loop_lag import LoopLag
from kvern.services.runtime.metrics import CONTENT_TYPE, new_registry, render
from kvern.services.runtime.tls import ServerTls
from kvern.services.runtime.tracing import NO_TRACER, Tracer

_GRACE_S = 1.0


class Status:
    """A process's health and metrics. All methods belong to the event loop."""

    def __init__(self, service: str) -> None:
        self.registry = new_registry(service)
        """The service adds its metrics here."""
        self._lag = LoopLag(self.registry)
        ready = Gauge("kvern_ready", "Whether new work may be sent here: what /readyz says.", registry=self.registry)
        ready.set_function(lambda: self.is_ready)
        self.tracer: Tracer = NO_TRACER
        """Begins spans, where traces are wanted."""
        self.is_ready = False
        """Whether new work may be sent here."""
        self.find_trouble: Callable[[], str] = str
        """Returns what only a restart can mend, or nothing. A process that still loads has no such trouble."""

    @asynccontextmanager
    async def serving(self, address: str | None, tls: ServerTls | None = None) -> AsyncIterator[None]:
        """Serve on `host:port` while the block runs; None serves nowhere. Raises ListenError.

        tls: None serves plain HTTP. Callers are asked for no certificate: kubelet has none to show.
        """
        if address is None:
            yield
            return
        lag = asyncio.create_task(self._lag.watch())
        try:
            context = None if tls is None else tls.ssl_context(asks_callers=False)
            async with serving(self._app(), [bind(address)], grace_s=_GRACE_S, tls=context):
                yield
        finally:
            lag.cancel()

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/metrics", self._metrics),
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
            ]
        )

    async def _metrics(self, request: Request) -> Response:
        # Thousands of series take milliseconds, in which the loop would stand still.
        text = await asyncio.to_thread(render, self.registry)
        return Response(text, media_type=CONTENT_TYPE)

    async def _healthz(self, request: Request) -> Response:
        trouble = self.find_trouble()
        return PlainTextResponse(f"{trouble or 'ok'}\n", status_code=503 if trouble else 200)

    async def _readyz(self, request: Request) -> Response:
        if self.is_ready:
            return PlainTextResponse("ready\n")
        return PlainTextResponse("not ready\n", status_code=503)
