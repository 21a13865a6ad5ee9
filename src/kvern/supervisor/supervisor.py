"""The life of a set: all start at once, what dies is started again, all are drained from the front to the back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvern.supervisor import log_lines
from kvern.supervisor.process import ChildProcess
from kvern.supervisor.stop import StopRequest

_TICK_S = 0.05

DRAIN_ORDER = (("gateway", "router"), ("detokenizer",), ("engine",), ("tokenizer", "redis"))
"""Who calls goes before who is called, so that nothing in flight loses what it needs."""


class StartFailed(Exception):
    """A process ended before the set was ready. The message carries what it said."""


class Observer(Protocol):
    """Is told what happens, in the supervisor's thread."""

    def waiting(self, names: Sequence[str], news: log_lines.News) -> None:
        """These are not ready yet; `news` is of an engine that is not, for it takes longest."""

    def process_ready(self, name: str) -> None: ...

    def process_died(self, name: str, cause: str, restart_delay_s: float) -> None: ...

    def set_ready(self) -> None:
        """All are, for the first time."""

    def draining(self) -> None: ...


class Supervisor:
    """Runs the processes of one set in the calling thread."""

    def __init__(self, processes: Sequence[ChildProcess], observer: Observer, drain_timeout_s: float) -> None:
        self._processes = processes
        self._observer = observer
        self._drain_timeout_s = drain_timeout_s

    def run(self, stop: StopRequest) -> None:
        """Start all, keep them alive until `stop`, drain. Nothing is left when it returns or raises StartFailed."""
        try:
            for process in self._processes:
                process.start()
            self._tick_until(lambda: stop.requested or self._all_ready, self._await_start)
            if stop.requested:
                return
            self._observer.set_ready()
            self._tick_until(lambda: stop.requested, self._keep_alive)
            self._observer.draining()
            self._drain(stop)
        finally:
            for process in self._processes:
                process.kill()

    @property
    def _all_ready(self) -> bool:
        return all(process.ready for process in self._processes)

    def _tick_until(self, done: Callable[[], bool], tick: Callable[[], None]) -> None:
        while not done():
            tick()
            time.sleep(_TICK_S)

    def _await_start(self) -> None:
        for process in self._processes:
            ended = process.reap()
            if ended is not None:
                raise StartFailed(f"{process.name} {ended[0]}\n{log_lines.last_words(process.log_path)}".rstrip())
            self._probe(process)
        waiting = [process for process in self._processes if not process.ready]
        engine_logs = [process.log_path for process in waiting if process.name.startswith("engine")]
        news = log_lines.last_news(engine_logs[0]) if engine_logs else log_lines.News("")
        self._observer.waiting([process.name for process in waiting], news)

    def _keep_alive(self) -> None:
        for process in self._processes:
            ended = process.reap()
            if ended is not None:
                self._observer.process_died(process.name, *ended)
            if not process.alive and process.restart_due:
                process.start()
            self._probe(process)

    def _probe(self, process: ChildProcess) -> None:
        if process.alive and not process.ready and process.probe():
            self._observer.process_ready(process.name)

    def _drain(self, stop: StopRequest) -> None:
        deadline = time.monotonic() + self._drain_timeout_s
        for services in DRAIN_ORDER:
            leaving = [process for process in self._processes if process.name.split("-")[0] in services]
            for process in leaving:
                process.terminate()
            while any(process.alive for process in leaving) and not stop.forced and time.monotonic() < deadline:
                time.sleep(_TICK_S)
