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
"""How long a client may take to send the head of a request, or the rest of one that is answered, in seconds."""

MAX_STALLED_S = 120.0
"""How long a client may read nothing of what is sent to it, in seconds."""

KEEP_ALIVE_S = 120
"""How long a connection stays open between requests, in seconds. Longer than proxies keep theirs, which is 60 to 90: a
request that meets a connection being closed is an error to their clients."""

_BACKLOG = 2048


class _Protocol(H11Protocol):
    """uvicorn's protocol, which by itself waits for ever for what clients do not send, or do not read."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._time_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def _should_upgrade(self) -> bool:
        return False  # uvicorn would log two warnings for each offer, and Java's client offers HTTP/2 every time

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.trailing_data[0]:  # the next head has begun to come
            self._time_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(MAX_STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def _time_head(self) -> None:
        is_answered = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        if self.conn.their_state is not h11.IDLE and not is_answered:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(MAX_HEAD_S, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


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
        timeout_keep_alive=KEEP_ALIVE_S,
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
