"""The side of `bounded_work` that works: a process that forks one for each connection, within limits of the kernel's.

    if __name__ == "__main__":
        serve(answer, Limits(cpu_s=1, num_bytes=512 * MiB))

It imports little, and what it forks has no threads to lose.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from pydantic_core import to_json

Message = dict[str, Any]
"""What JSON can hold."""

MIB = 1024 * 1024

_HEADER = struct.Struct("<Q")


class Limits(NamedTuple):
    """What one answer may take. Who takes more is ended."""

    cpu_s: float
    """Of the process' own time, so that a busy machine makes no difference."""
    num_bytes: int
    """Of memory, beside what is there before."""
    stack_bytes: int | None = None
    """None: as the system has it."""
    niceness: int = 0


def serve(answer: Callable[[Message], Message], limits: Limits) -> None:
    """Fork for each connection that comes over the one whose number is in argv, until there is nobody to send any."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(fileno=int(sys.argv[1])) as control:
        while True:
            message, connections, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            if os.fork() == 0:
                control.close()
                _hold_to(limits)
                with suppress(OSError, MemoryError):  # nobody waits for the answer any more, or a job finds no room
                    _work(socket.socket(fileno=connections[0]), answer, limits.cpu_s)
                os._exit(0)
            os.close(connections[0])


def _work(connection: socket.socket, answer: Callable[[Message], Message], cpu_s: float) -> None:
    """Say that it is there, then give one answer after the other, until the connection ends."""
    with connection.makefile("rb") as jobs, connection.makefile("wb") as answers:
        write_frame(answers, {})
        while (task := read_frame(jobs)) is not None:
            signal.setitimer(signal.ITIMER_PROF, task["cpu_s"] or cpu_s)  # its signal ends the process in any case
            answered = answer(task["job"])
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_frame(answers, answered)


def _hold_to(limits: Limits) -> None:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    num_bytes = num_pages * resource.getpagesize() + limits.num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limits.stack_bytes is not None:
        resource.setrlimit(resource.RLIMIT_STACK, (limits.stack_bytes, limits.stack_bytes))
    os.nice(limits.niceness)


def write_frame(stream: IO[bytes], message: Message) -> None:
    """Raises ValueError for what JSON cannot hold, OSError where nobody reads."""
    data = to_json(message)
    stream.write(_HEADER.pack(len(data)))
    stream.write(data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Message | None:
    """Return the next message, None where the other side is gone. Raises OSError."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (num_bytes,) = _HEADER.unpack(header)
    data = stream.read(num_bytes)
    # Not pydantic's reader, whose bound on depth a job would pass that holds what was just within it.
    return json.loads(data) if len(data) == num_bytes else None
