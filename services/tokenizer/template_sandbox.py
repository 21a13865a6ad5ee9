"""Has chats rendered by other processes, so that a template that loops or fills the memory harms nobody."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from typing import IO, Any

from kvern.services.runtime.errors import InvalidArgument, Unavailable
from kvern.services.tokenizer.template_wire import MAX_BYTES, MAX_CPU_S, read_frame, write_frame

MAX_WAIT_S = 30.0
"""For an answer, whatever keeps the other side from giving one."""

_MODULE = "kvern.services.tokenizer.template_process"
_LIMITS = f"{MAX_CPU_S:g} s of processor time or {MAX_BYTES >> 20} MiB of memory"


class TemplateRefused(Exception):
    """A template refuses a chat, in its own words."""


class TemplateSandbox:
    """Renders the chats of one model. Threads may share it; each gets a process to itself, which others use later."""

    def __init__(self) -> None:
        self._idle: list[_Renderer] = []
        _forks.start()

    def render(self, job: dict[str, Any]) -> str:
        """Return the text of a chat. `job`: arguments of transformers' render_jinja_template, and `variables`.

        Raises TemplateRefused, InvalidArgument where it takes too much time or memory, Unavailable where nothing can be
        rendered.
        """
        renderer = self._take()
        try:
            answer = renderer.ask(job)
        except ValueError as error:  # a number that has too many digits to be written down
            raise TemplateRefused(str(error)) from error
        except OSError:
            answer = None
        if answer is None:
            renderer.close()
            raise InvalidArgument("chat", f"the model's template needs more than {_LIMITS} for it")
        self._idle.append(renderer)
        if "refused" in answer:
            raise TemplateRefused(answer["refused"])
        return str(answer["rendered"])

    def _take(self) -> _Renderer:
        try:
            return self._idle.pop()
        except IndexError:
            return _Renderer()


class _Renderer:
    """A process that renders."""

    def __init__(self) -> None:
        """Raises Unavailable."""
        connection, other = socket.socketpair()
        with other:
            _forks.send(other)
        connection.settimeout(MAX_WAIT_S)
        self._jobs: IO[bytes] = connection.makefile("wb")
        self._answers: IO[bytes] = connection.makefile("rb")
        self.close = weakref.finalize(self, _close, self._jobs, self._answers, connection)

    def ask(self, job: dict[str, Any]) -> dict[str, Any] | None:
        """Return its answer; None where it has ended. Raises OSError likewise."""
        write_frame(self._jobs, job)
        return read_frame(self._answers)


def _close(*files: IO[bytes] | socket.socket) -> None:
    for file in files:
        with suppress(OSError):  # what was written may have nowhere to go
            file.close()


class _Forks:
    """The process that others are forked from. There is one, started when first needed, and again when it died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self._end)

    def start(self) -> None:
        """Have it load, which takes a second, while others do something else."""
        with self._lock:
            self._running()

    def send(self, connection: socket.socket) -> None:
        """Have a process forked that serves a connection. Raises Unavailable."""
        with self._lock:
            for control in (self._running(), None):
                try:
                    socket.send_fds(control or self._restarted(), [b"\0"], [connection.fileno()])
                except OSError as error:
                    failure = error
                else:
                    return
        raise Unavailable("chats cannot be rendered now") from failure

    def _running(self) -> socket.socket:
        return self._control or self._restarted()

    def _restarted(self) -> socket.socket:
        control, other = socket.socketpair()
        command = [sys.executable, "-P", "-m", _MODULE, str(other.fileno())]
        # Threads would not survive the fork.
        environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        self._end()
        with other:
            self._process = subprocess.Popen(
                command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, env=environ, start_new_session=True
            )
        self._control = control
        return control

    def _end(self) -> None:
        """Let it go: without its connection it ends by itself."""
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait()


_forks = _Forks()
