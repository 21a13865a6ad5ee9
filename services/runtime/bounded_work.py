"""Work whose cost others' input decides, done by processes that may be lost: a loop without an end, memory without a
bound or a library's crash harms nobody else.

    work = BoundedWork("kvern.services.tokenizer.template_process")
    answer = work.ask(job)
"""

from __future__ import annotations

import atexit
import functools
import os
import select
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from typing import IO

from kvern.services.runtime.bounded_process import Message, read_frame, write_frame
from kvern.services.runtime.errors import Unavailable

MAX_WAIT_S = 30.0
"""For an answer, whatever keeps the other side from giving one."""


class BoundedWork:
    """Processes of one kind. Threads may share it; each gets one to itself, which others use later."""

    def __init__(self, module: str, setup: bytes = b"") -> None:
        """module: calls `bounded_process.serve` when it is run. It begins to load at once. setup: what it may read from
        its standard input before.
        """
        self._idle: list[_Process] = []
        self._forks = _forks_of(module, setup)

    def ask(self, job: Message, *, cpu_s: float | None = None) -> Message | None:
        """Return the answer to a job; None where none came within the limits.

        cpu_s: of processor time, where it shall have less than the limits say. Raises ValueError for a job that JSON
        cannot hold, Unavailable where nobody can work on it.
        """
        process = self._take()
        try:
            answer = process.ask({"job": job, "cpu_s": cpu_s})
        except OSError:
            answer = None
        except ValueError:
            process.close()
            raise
        if answer is None:
            process.close()
        else:
            self._idle.append(process)
        return answer

    def _take(self) -> _Process:
        """Return a process that has nothing to do. Raises Unavailable."""
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                return _Process(self._forks)
            if process.is_there:
                return process
            process.close()  # whoever ended it, the job that comes now has no part in it


class _Process:
    def __init__(self, forks: _Forks) -> None:
        """Raises Unavailable."""
        connection, other = socket.socketpair()
        connection.settimeout(MAX_WAIT_S)
        self._jobs: IO[bytes] = connection.makefile("wb")
        self._answers: IO[bytes] = connection.makefile("rb")
        self.close = weakref.finalize(self, _close, self._jobs, self._answers, connection)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        try:
            with other:
                forks.send(other)
            self._wait_until_ready()
        except Unavailable:
            self.close()
            raise

    @property
    def is_there(self) -> bool:
        """Whether it has not ended. Only between jobs: then there is nothing else to be read of it."""
        return not self._poll.poll(0)

    def ask(self, task: Message) -> Message | None:
        """Return its answer; None where it has ended. Raises OSError likewise."""
        write_frame(self._jobs, task)
        return read_frame(self._answers)

    def _wait_until_ready(self) -> None:
        # Before it has a job, so that what becomes of it then is the job's doing.
        try:
            is_ready = read_frame(self._answers) is not None
        except OSError:
            is_ready = False
        if not is_ready:
            raise Unavailable("no process could be started for this work")


def _close(*files: IO[bytes] | socket.socket) -> None:
    for file in files:
        with suppress(OSError):  # what was written may have nowhere to go
            file.close()


class _Forks:
    """The process that others are forked from: started when it is first needed, and again when it died."""

    def __init__(self, module: str, setup: bytes) -> None:
        self._module = module
        self._setup = setup
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        atexit.register(self._end)

    def start(self) -> None:
        """Let it load, which takes a second, while others do something else."""
        with self._lock:
            if self._control is None:
                self._restart()

    def send(self, connection: socket.socket) -> None:
        """Have a process forked that serves a connection. Raises Unavailable."""
        with self._lock:
            try:
                self._send(connection)
            except OSError:
                self._restart()
                try:
                    self._send(connection)
                except OSError as error:
                    raise Unavailable(f"{self._module} does not run") from error

    def _send(self, connection: socket.socket) -> None:
        if self._control is None:
            raise OSError("not started")
        socket.send_fds(self._control, [b"\0"], [connection.fileno()])

    def _restart(self) -> None:
        self._end()
        self._control, other = socket.socketpair()
        command = [sys.executable, "-P", "-m", self._module, str(other.fileno())]
        # Numerical libraries start threads where they are imported, and those would not survive a fork.
        environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        with other, open(os.memfd_create(self._module), "w+b") as setup:
            setup.write(self._setup)
            setup.seek(0)
            # A session of its own: Ctrl-C at a terminal is its parent's.
            self.process = subprocess.Popen(
                command, pass_fds=[other.fileno()], stdin=setup, env=environ, start_new_session=True
            )

    def _end(self) -> None:
        """End it, whatever it does. What it forked ends with its connections."""
        if self._control is not None and self.process is not None:
            self._control.close()
            self.process.kill()
            self.process.wait()


@functools.cache
def _forks_of(module: str, setup: bytes = b"") -> _Forks:
    """Return the one process of a module with a setup that others are forked from."""
    forks = _Forks(module, setup)
    forks.start()
    return forks
