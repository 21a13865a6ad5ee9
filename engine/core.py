"""The engine's core loop: commands in, results out, one step after another. It does nothing but schedule and launch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from kvern.engine.errors import RequestRefused
from kvern.engine.plan import Runner, StepResult
from kvern.engine.request import Request
from kvern.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Add:
    """Take in a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop a request. Unknown ids are ignored."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop after the step under way."""


Command = Add | Abort | Stop


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was not taken. `field` is the client's field at fault, or empty."""

    request_id: int
    field: str
    message: str


Output = StepResult | Refused


class EngineCore:
    """Runs on a thread of its own, which alone touches scheduler, pool and device. No locks: commands come by a queue
    and are applied between steps; results leave through `emit`."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._stopping = False
        self.last_step_at = time.monotonic()
        """When the last step ended, or the engine last had nothing to do, by time.monotonic(). Read by any thread."""

    def send(self, command: Command) -> None:
        """Hand a command to the loop. Any thread may call this."""
        self._commands.put(command)

    def run(self, emit: Callable[[Output], None]) -> None:
        """Loop until Stop. `emit` is called on this thread and must not block."""
        while True:
            self._apply_commands(emit)
            if self._stopping:
                return
            plan = self._scheduler.schedule()
            if not plan:
                raise RuntimeError("there are requests, and the scheduler runs none of them")
            sampled = self._runner.submit(plan).result()
            emit(self._scheduler.commit(plan, sampled))
            self.last_step_at = time.monotonic()

    def _apply_commands(self, emit: Callable[[Output], None]) -> None:
        """Apply what has arrived; with nothing to run, wait for something to do."""
        while not self._stopping:
            try:
                command = self._commands.get(block=not self._scheduler.has_work)
            except Empty:
                return
            self._apply(command, emit)
            self.last_step_at = time.monotonic()

    def _apply(self, command: Command, emit: Callable[[Output], None]) -> None:
        match command:
            case Add(request):
                try:
                    self._scheduler.add(request)
                except RequestRefused as error:
                    emit(Refused(request.request_id, error.field, str(error)))
            case Abort(request_id):
                self._scheduler.abort(request_id)
                emit(StepResult(load=self._scheduler.load()))
            case Stop():
                self._stopping = True
