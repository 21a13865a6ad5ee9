"""How the gateway serves and drains."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import structlog
from starlette.types import ASGIApp

from kvern.services.runtime.http_server import bind, serving
from kvern.services.runtime.settings import ServiceSettings
from kvern.services.runtime.tls import server_tls

_log = structlog.get_logger("kvern.server")


async def serve(app: ASGIApp, settings: ServiceSettings, on_drain: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain: `on_drain` is called, after `drain_delay_s` no connection is taken,
    and requests in flight have `drain_timeout_s` to end. Raises ListenError, UnusableFile.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    sockets = [bind(address) for address in settings.listen]
    tls = server_tls(settings)
    context = None if tls is None else tls.ssl_context()
    async with serving(app, sockets, grace_s=settings.drain_timeout_s, tls=context):
        _log.info("listening", addresses=list(settings.listen))
        await stop.wait()
        _log.info("draining", delay_s=settings.drain_delay_s, timeout_s=settings.drain_timeout_s)
        on_drain()
        await asyncio.sleep(settings.drain_delay_s)
    _log.info("stopped")
