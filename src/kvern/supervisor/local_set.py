"""A set that may start: its settings checked, its model found, its ports free, and its claim to them held."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from kvern.services.runtime.model_source import ModelSource
from kvern.supervisor.addresses import Address, claim
from kvern.supervisor.folders import SetLock, log_folder, run_folder
from kvern.supervisor.launch import SetOptions, prepare
from kvern.supervisor.process import ChildProcess
from kvern.supervisor.stop import StopRequest
from kvern.supervisor.supervisor import Observer, Supervisor


@dataclass(frozen=True, slots=True)
class LocalSet:
    """Everything about a set that is fixed before it starts."""

    listen: Address
    http: Address
    replicas: int
    model: ModelSource
    sockets: Path
    logs: Path
    status: Mapping[str, str]
    """Where each service tells of its health and metrics, by process name. Empty unless it was asked for."""
    has_tls: bool
    """Whether its TCP ports speak TLS."""
    asks_callers: bool
    """Whether the router asks callers who they are."""
    processes: list[ChildProcess]
    drain_timeout_s: float

    @property
    def router(self) -> str:
        """Where its own machine's user calls the router: over its socket, without TLS."""
        return f"unix:{self.sockets / 'router.sock'}"

    def run(self, stop: StopRequest, observer: Observer) -> None:
        """Start, serve until `stop`, drain, in this thread. Raises StartFailed."""
        Supervisor(self.processes, observer, self.drain_timeout_s).run(stop)


@contextmanager
def open_set(options: SetOptions) -> Iterator[LocalSet]:
    """Check and claim what a set needs. Where the port was 0, its folders go with it unless it fails.

    Raises SettingsError, ModelNotFound, AddressError, FolderError, SetRunning.
    """
    with (
        _numbered(options.listen, "--listen") as listen,
        _numbered(options.http, "--http") as http,
        _open_numbered(replace(options, listen=listen, http=http), temporary=options.listen.port == 0) as opened,
    ):
        yield opened


@contextmanager
def _open_numbered(chosen: SetOptions, *, temporary: bool) -> Iterator[LocalSet]:
    sockets, logs = run_folder(chosen.listen.port), log_folder(chosen.listen.port)
    launch = prepare(chosen, sockets)
    lock = SetLock(sockets)
    keep_logs = not temporary
    try:
        with claim(chosen.listen, "--listen"), claim(chosen.http, "--http"):
            _make_empty(logs)
        processes = [ChildProcess(spec, logs / f"{spec.name}.log", lock.inherited_fd) for spec in launch.specs]
        yield LocalSet(
            chosen.listen,
            chosen.http,
            chosen.replicas,
            launch.model,
            sockets,
            logs,
            launch.status,
            launch.has_tls,
            launch.asks_callers,
            processes,
            launch.drain_timeout_s,
        )
    except Exception:
        keep_logs = True
        raise
    finally:
        if not keep_logs:
            shutil.rmtree(logs, ignore_errors=True)
        lock.release(forget=temporary)


def _make_empty(logs: Path) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    for earlier in logs.glob("*.log"):
        earlier.unlink()


def _numbered(address: Address, flag: str) -> AbstractContextManager[Address]:
    """Give the address, with a port in place of 0 that nobody else is given while the block runs."""
    return claim(address, flag) if address.port == 0 else nullcontext(address)
