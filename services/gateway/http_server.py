"""One way to run an HTTP server: addresses in use refused clearly, and a drain on SIGTERM."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
import uvicorn
from starlette.types import ASGIApp

from kvern.services.runtime.listen import ListenError
from kvern.services.runtime.settings import ServiceSettings

_BACKLOG = 2048

_log = structlog.get_logger("kvern.server")


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: they would stop it listening before load balancers have noticed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(app: ASGIApp, settings: ServiceSettings, on_drain: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain: `on_drain` is called, after `drain_delay_s` no connection is taken,
    and requests in flight have `drain_timeout_s` to end. Raises ListenError.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    sockets = [_bind(address) for address in settings.listen]
    server = _Server(_config(app, settings))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets))
        _log.info("listening", addresses=list(settings.listen))
        await stop.wait()
        _log.info("draining", delay_s=settings.drain_delay_s, timeout_s=settings.drain_timeout_s)
        on_drain()
        await asyncio.sleep(settings.drain_delay_s)
        server.should_exit = True
    _log.info("stopped")


def _config(app: ASGIApp, settings: ServiceSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=math.ceil(settings.drain_timeout_s),
    )


def _bind(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ListenError(f"listen: cannot bind {address}: {error.strerror}") from error
    return listener
