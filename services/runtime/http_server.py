"""An HTTP server inside a service's event loop, which leaves signals to the service."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvern.services.runtime.listen import ListenError

MAX_HEAD_S = 30.0
"""How long a client may take to send the head of a request, in seconds."""

_BACKLOG = 2048


class _Protocol(H11Protocol):
    """uvicorn's protocol, which by itself waits for ever for the rest of a head."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._time_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _time_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(MAX_HEAD_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: they would stop it listening before load balancers have noticed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(
    app: ASGIApp, sockets: Sequence[socket.socket], *, grace_s: float, tls: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """Serve while the block runs. Then requests in flight have `grace_s` seconds to end.

    tls: None serves plain HTTP.
    """
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=math.ceil(grace_s),
    )
    config.load()
    config.ssl = tls  # uvicorn's own would be made of files once
    server = _Server(config)
    # Not a task group: it would wrap the errors of the block, which the process tells people by their kind.
    running = asyncio.create_task(server.serve(list(sockets)))
    try:
        yield
    finally:
        server.should_exit = True
        await running


def bind(address: str) -> socket.socket:
    """Listen on `host:port`. Raises ListenError."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as opened:
            listener = opened.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(_BACKLOG)
            opened.pop_all()
    except OSError as error:
        raise ListenError(f"listen: cannot bind {address}: {error.strerror}") from error
    return listener
