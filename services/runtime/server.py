"""One way to run a gRPC server: health, reflection, errors to statuses, and a drain on SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvern.services.runtime.call_spans import SpanInterceptor
from kvern.services.runtime.channel import SERVER_OPTIONS
from kvern.services.runtime.health import HEALTH_SERVICE, HealthServicer
from kvern.services.runtime.interceptors import Admit, ErrorInterceptor, admit_all
from kvern.services.runtime.listen import bind, share_with_group
from kvern.services.runtime.rpc_metrics import MetricsInterceptor
from kvern.services.runtime.settings import ServiceSettings
from kvern.services.runtime.status import Status
from kvern.services.runtime.tls import server_tls

_log = structlog.get_logger("kvern.server")

_STATUS = {True: health_pb2.HealthCheckResponse.SERVING, False: health_pb2.HealthCheckResponse.NOT_SERVING}


class GrpcServer:
    """A gRPC server of one service process.

        async with GrpcServer(settings, ["kvern.v1.TokenizerService"], status) as server:
            add_TokenizerServiceServicer_to_server(servicer, server.grpc)
            await server.start()
            server.set_ready(True)
            await server.wait_for_stop()

    Leaving the block drains: health says NOT_SERVING, after `drain_delay_s` new calls are refused, and calls in
    flight have `drain_timeout_s` to end.
    """

    def __init__(
        self, settings: ServiceSettings, services: Sequence[str], status: Status, admit: Admit = admit_all
    ) -> None:
        """status: is told whenever the process becomes ready or stops to be. admit: decides who may call what, the
        health service and reflection included.
        """
        self._settings = settings
        self._status = status
        self._services = [*services, ""]
        self._health = HealthServicer()
        self._locks = ExitStack()
        self._stop = asyncio.Event()
        self._health_tasks: set[asyncio.Task[None]] = set()
        self._others: dict[str, bool] = {}
        spans = [SpanInterceptor(status.tracer)] if status.tracer.is_on else []
        self.observers = [*spans, MetricsInterceptor(status.registry)]
        """What counts and traces calls, for other servers of the process too."""
        interceptors = [*self.observers, ErrorInterceptor(admit)]
        self.grpc = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        """Servicers are added to this one before `start`."""

    async def __aenter__(self) -> Self:
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = [*self._services[:-1], HEALTH_SERVICE, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.grpc)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        await self._set_health(ready=False)
        return self

    async def start(self) -> None:
        """Listen. Raises ListenError where an address cannot be had, UnusableFile for certificates."""
        tls = server_tls(self._settings)
        credentials = None if tls is None else tls.grpc_credentials()
        for address in self._settings.listen:
            lock = bind(self.grpc, address, credentials)
            if lock is not None:
                self._locks.enter_context(lock)
        await self.grpc.start()
        for address in self._settings.listen:
            share_with_group(address)
        _log.info("listening", addresses=list(self._settings.listen))

    def set_ready(self, ready: bool) -> None:
        """Say through the health service whether this process can do its work. Ignored once draining."""
        if ready == self._status.is_ready or self._stop.is_set():
            return
        self._status.is_ready = ready
        _log.info("ready" if ready else "not ready")
        self._in_background(self._set_health(ready=ready))

    def set_health(self, name: str, serving: bool) -> None:
        """Say how something is that is asked for by a name of its own, whatever the process can do without it."""
        if self._others.get(name) is not serving:
            self._others[name] = serving
            self._in_background(self._health.set(name, _STATUS[serving]))

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    async def wait_for_stop(self) -> None:
        """Wait for SIGTERM, SIGINT or `stop()`."""
        await self._stop.wait()

    def stop(self) -> None:
        """Begin to drain, as SIGTERM would."""
        self._stop.set()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._status.is_ready = False
        with self._locks:
            if exc is None:
                _log.info("draining", delay_s=self._settings.drain_delay_s, timeout_s=self._settings.drain_timeout_s)
                await self._health.enter_graceful_shutdown()
                await asyncio.sleep(self._settings.drain_delay_s)
            self._health.end_watches()
            await self.grpc.stop(self._settings.drain_timeout_s if exc is None else 0)
        _log.info("stopped")

    def _in_background(self, change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(change)
        self._health_tasks.add(task)
        task.add_done_callback(self._health_tasks.discard)

    async def _set_health(self, *, ready: bool) -> None:
        for name in self._services:
            await self._health.set(name, _STATUS[ready])
