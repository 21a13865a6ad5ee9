"""The second thread of the process: it loads the model, then runs the engine core and alone touches the device."""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import structlog

from kvern.engine.config import EngineConfig
from kvern.engine.core import Command, EngineCore, Output, Stop
from kvern.engine.startup import Engine, start_engine

_SWITCH_INTERVAL_S = 1e-4
"""How long a thread may keep the GIL while the other wants it. Python's 5 ms would delay every stream."""

_END_S = 10.0
"""How long the process waits for a thread that still loads, in seconds."""

_log = structlog.get_logger("kvern.engine")

_T = TypeVar("_T")


class EngineThread:
    """Owns the thread. All methods belong to the event loop; outputs arrive there through `on_output`."""

    def __init__(self, config: EngineConfig, on_output: Callable[[Output], None]) -> None:
        self._config = config
        self._on_output = on_output
        self._loop = asyncio.get_running_loop()
        self._core: EngineCore | None = None
        self.loaded: asyncio.Future[Engine] = self._loop.create_future()
        """The engine once it is loaded, or why it could not be."""
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done after `stop`, or failed with what the engine died of."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._may_emit = threading.Event()
        self._may_emit.set()
        self._went_on_at = 0.0
        self._progress = _ProgressLog()
        self._is_unwanted = False

    def start(self) -> None:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._thread.start()
        atexit.register(self._end_loading)

    @property
    def step_age_s(self) -> float:
        """Seconds since the last step ended. 0 where there is nothing to do: before the engine is loaded, without work,
        and while it is paused."""
        core = self._core
        if core is None or core.is_idle or not self._may_emit.is_set():
            return 0.0
        return max(0.0, time.monotonic() - max(core.last_step_at, self._went_on_at))

    @property
    def expected_step_s(self) -> float:
        """Seconds that the step under way should take, 0 where nothing is known."""
        return (self._core.expected_step_s or 0.0) if self._core is not None else 0.0

    def send(self, command: Command) -> None:
        """Hand a command to the core. Only after `loaded`."""
        assert self._core is not None
        self._core.send(command)

    def pause(self) -> None:
        """Hold the engine up at its next output, until `go_on`: its reader does not keep up."""
        self._may_emit.clear()

    def go_on(self) -> None:
        if not self._may_emit.is_set():
            self._went_on_at = time.monotonic()
            self._may_emit.set()

    async def stop(self) -> None:
        """End the loop after the step under way, if the engine was loaded."""
        self.go_on()
        if self._core is not None:
            self._core.send(Stop())
            await asyncio.wait([self.ended])

    def _run(self) -> None:
        try:
            engine = start_engine(self._config, self._on_progress, self._fail)
            self._check_wanted()
        except Exception as error:
            self._fail(error)
            return
        self._core = engine.core
        self._in_loop(self.loaded.set_result, engine)
        try:
            engine.core.run(self._emit)
        except Exception as error:
            self._fail(error)
        else:
            self._in_loop(self._set_ended, None)
        finally:
            engine.close()

    def _on_progress(self, fraction: float, what: str) -> None:
        self._check_wanted()
        self._progress(fraction, what)

    def _check_wanted(self) -> None:
        if self._is_unwanted:
            raise RuntimeError("the process ends")

    def _end_loading(self) -> None:
        """Have a thread that still loads end before Python does: back from C++ later, it would abort the process."""
        self._is_unwanted = True
        if self._core is None:
            self._thread.join(_END_S)

    def _fail(self, error: Exception) -> None:
        """Tell what the engine died of, or will: where another rank is gone, this one may wait for it in a step."""
        self._in_loop(self._set_failed, error)

    def _set_failed(self, error: Exception) -> None:
        future = self.ended if self.loaded.done() else self.loaded
        if not future.done():
            future.set_exception(error)

    def _set_ended(self, _: None) -> None:
        if not self.ended.done():  # it may have failed before: another rank was lost while this one had nothing to do
            self.ended.set_result(None)

    def _emit(self, output: Output) -> None:
        self._may_emit.wait()
        self._in_loop(self._on_output, output)

    def _in_loop(self, function: Callable[[_T], object], argument: _T) -> None:
        # A thread that was given up, stuck in a step, may end after its loop.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, argument)


class _ProgressLog:
    """Logs by the tenth, each thing that is done from the beginning: a model has hundreds of tensors."""

    def __init__(self) -> None:
        self._logged = -1

    def __call__(self, fraction: float, what: str) -> None:
        tenths = int(fraction * 10)
        if tenths != self._logged:
            self._logged = tenths
            _log.info("loading", progress=round(fraction, 2), what=what)
