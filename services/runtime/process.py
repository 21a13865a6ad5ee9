"""How a service process starts and ends."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import structlog

from kvern.services.runtime.certificates import watch_certificates
from kvern.services.runtime.event_loop import EventLoop
from kvern.services.runtime.listen import ListenError
from kvern.services.runtime.logs import configure_logs
from kvern.services.runtime.model_source import ModelNotFound
from kvern.services.runtime.reloading import UnusableFile
from kvern.services.runtime.settings import ServiceSettings, SettingsError
from kvern.services.runtime.status import Status
from kvern.services.runtime.tls import server_tls
from kvern.services.runtime.tracing import tracing

EXIT_USAGE = 2
"""A setting is wrong: a supervisor need not try again."""

EXIT_FAILED = 1

_PR_SET_PDEATHSIG = 1

_Settings = TypeVar("_Settings", bound=ServiceSettings)


def run_service(
    name: str,
    settings_class: type[_Settings],
    main: Callable[[_Settings, Status], Coroutine[Any, Any, None]],
    *,
    expected_errors: tuple[type[Exception], ...] = (),
) -> NoReturn:
    """Parse settings, run `main` while its status is served, exit.

    An error a person can act on is one line on stderr and a status, without a traceback: a wrong setting, a taken
    address, a missing model, an unusable file, and what the service names in `expected_errors`.
    """
    try:
        settings = settings_class.load(sys.argv[1:], prog=f"python -m kvern.services.{name}")
    except SettingsError as error:
        print(f"kvern {name}: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    if settings.supervisor_pid is not None:
        exit_with_parent(settings.supervisor_pid)
    configure_logs(name, settings.log_level, settings.log_format)
    expected: tuple[type[Exception], ...] = (ListenError, ModelNotFound, UnusableFile, *expected_errors)
    try:
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            runner.run(_run(name, main, settings))
    except expected as error:
        structlog.get_logger("kvern").critical(str(error))
        sys.exit(EXIT_FAILED)
    sys.exit(0)


async def _run(name: str, main: Callable[[_Settings, Status], Coroutine[Any, Any, None]], settings: _Settings) -> None:
    status = Status(name)
    # What was loaded at start lives for ever: a full collection that walks it would stop the loop for nothing.
    gc.collect()
    gc.freeze()
    # Served to the very end: a drain is when people look.
    watch_certificates(status.registry, settings.certificate_files)
    async with status.serving(settings.status_listen, server_tls(settings)), tracing(name, settings) as status.tracer:
        await main(settings, status)


def exit_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent is gone, however that came. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it was gone before we asked
        sys.exit(EXIT_FAILED)
