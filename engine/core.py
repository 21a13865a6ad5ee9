"""The engine's core loop: commands in, results out, one step after another. It does nothing but schedule and launch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from kvern.engine.errors import RequestRefused
from kvern.engine.plan import FirstScheduled, Plan, Runner, StepResult, StepStats, Submission
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
class Park:
    """Let a request stand still. Unknown ids are ignored."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Unpark:
    """Let a parked request go on. Others are ignored."""

    request_id: int


@dataclass(frozen=True, slots=True)
class ResetCache:
    """Forget all cached blocks."""


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """List all cached blocks."""

    reply: Callable[[list[bytes]], object]
    """Given all resident digests, parents before children, once the events that led there have been emitted. Called on
    the loop's thread, and must not block."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop after the step under way."""


Command = Add | Abort | Park | Unpark | ResetCache | TakeSnapshot | Stop


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was not taken. `field` is the client's field at fault, or empty."""

    request_id: int
    field: str
    message: str


Output = StepResult | Refused


class _Stopwatch:
    """Splits the time that passes among those who take it."""

    def __init__(self) -> None:
        self._taken_at_ns = time.perf_counter_ns()

    def take_ns(self) -> int:
        """Return the nanoseconds since the last call."""
        now_ns = time.perf_counter_ns()
        passed_ns, self._taken_at_ns = now_ns - self._taken_at_ns, now_ns
        return passed_ns


class EngineCore:
    """Runs on a thread of its own, which alone touches scheduler, pool and device. No locks: commands come by a queue
    and are applied between steps; results leave through `emit`."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, depth: int = 0) -> None:
        """depth: how many steps may be planned and launched before the results of an earlier one are taken in. 1 hides
        the host's work behind a GPU's; a CPU has nothing to hide it behind."""
        self._scheduler = scheduler
        self._runner = runner
        self._depth = depth
        self._in_flight: deque[tuple[Plan, Submission]] = deque()
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._stopping = False
        self._stopwatch = _Stopwatch()
        self._emit_ns = 0
        self.is_idle = False
        """Whether the loop waits for something to do. Read by any thread."""
        self.last_step_at = time.monotonic()
        """When the last step ended, or the engine last had nothing to do, by time.monotonic(). Read by any thread."""
        self.expected_step_s: float | None = None
        """How long the step under way should take, in seconds. None: none was like it. Read by any thread."""

    def send(self, command: Command) -> None:
        """Hand a command to the loop. Any thread may call this."""
        self._commands.put(command)

    def run(self, emit: Callable[[Output], None]) -> None:
        """Loop until Stop. `emit` is called on this thread and must not block."""
        while True:
            self._apply_commands(emit)
            if self._stopping:
                return
            plan = self._schedule(emit)
            if plan:
                self.expected_step_s = self._scheduler.expected_step_s(plan)
                self._in_flight.append((plan, self._runner.submit(plan)))
            elif not self._in_flight and self._scheduler.has_work:
                raise RuntimeError("there are requests, and the scheduler runs none of them")
            while len(self._in_flight) > self._depth or (self._in_flight and not plan):
                self._commit(*self._in_flight.popleft(), emit)

    def _schedule(self, emit: Callable[[Output], None]) -> Plan:
        commands_ns = self._stopwatch.take_ns()
        plan = self._scheduler.schedule()
        times = plan.times
        times.commands_ns, times.schedule_ns = commands_ns, self._stopwatch.take_ns()
        if plan.first_scheduled:
            emit(self._result(scheduled=plan.first_scheduled))
        times.emit_ns, self._emit_ns = self._emit_ns + self._stopwatch.take_ns(), 0
        return plan

    def _commit(self, plan: Plan, submission: Submission, emit: Callable[[Output], None]) -> None:
        sampled = submission.result()
        now = time.monotonic()
        # With steps in flight, what counts is how far apart they end.
        seconds = now - self.last_step_at
        self._scheduler.observe(plan, seconds)
        self.last_step_at = now
        self._stopwatch.take_ns()  # what passed so far is the runner's to tell
        result = self._scheduler.commit(plan, sampled)
        result.cache_events = self._scheduler.pool.take_events()
        plan.times.commit_ns = self._stopwatch.take_ns()
        result.step = StepStats(len(plan.entries), plan.num_tokens, seconds, plan.times)
        emit(result)
        self._emit_ns = self._stopwatch.take_ns()

    def _result(self, scheduled: Sequence[FirstScheduled] = ()) -> StepResult:
        """Return what there is to tell beside what steps bring."""
        events = self._scheduler.pool.take_events()
        return StepResult(scheduled=list(scheduled), cache_events=events, load=self._scheduler.load())

    def _apply_commands(self, emit: Callable[[Output], None]) -> None:
        """Apply what has arrived; with nothing to run and nothing in flight, wait for something to do."""
        while not self._stopping:
            self.is_idle = is_idle = not self._in_flight and not self._scheduler.has_work
            try:
                command = self._commands.get(block=is_idle)
            except Empty:
                return
            if is_idle:
                # In this order: whoever reads both must not take the wait for work.
                self.last_step_at = time.monotonic()
                self.is_idle = False
                self._stopwatch.take_ns()
            self._apply(command, emit)

    def _apply(self, command: Command, emit: Callable[[Output], None]) -> None:
        match command:
            case Add(request):
                try:
                    self._scheduler.add(request)
                except RequestRefused as error:
                    emit(Refused(request.request_id, error.field, str(error)))
            case Abort(request_id):
                self._scheduler.abort(request_id)
                emit(self._result())
            case Park(request_id):
                self._scheduler.park(request_id)
            case Unpark(request_id):
                self._scheduler.unpark(request_id)
            case ResetCache():
                self._scheduler.reset_cache()
                emit(self._result())
            case TakeSnapshot(reply):
                # Between steps no event is pending: each result has taken those before it.
                reply(self._scheduler.pool.resident_digests)
            case Stop():
                self._stopping = True
