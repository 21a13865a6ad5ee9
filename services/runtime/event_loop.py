"""The event loop of every service: uvloop's, with what gRPC does to it put right."""

from __future__ import annotations

import array
import fcntl
import socket
import termios
from collections.abc import Callable
from functools import partial
from typing import Any

import uvloop


class EventLoop(uvloop.Loop):  # type: ignore[misc]  # the library is untyped
    """Reads all of gRPC's wake-ups at once.

    gRPC's thread puts each finished operation into a queue and writes a byte to a socket for it. When the loop sees the
    socket, gRPC empties the queue and reads one byte: of a burst the others stay, and each is one more turn of the loop
    for nothing. A few hundred fill the socket. Then the thread waits for room, and operations are heard of one a turn.
    """

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        if isinstance(fd, socket.socket) and _is_grpc(callback):
            callback = partial(_read_all_but_one, fd, callback)
        super().add_reader(fd, callback, *args)


def _is_grpc(callback: Callable[..., object]) -> bool:
    # By its name: the class is gRPC's own affair. Should it change, the loop is as slow as before.
    function = callback.func if isinstance(callback, partial) else callback
    return type(getattr(function, "__self__", None)).__name__ == "PollerCompletionQueue"


def _read_all_but_one(wake_ups: socket.socket, callback: Callable[..., object], *args: Any) -> None:
    # Operations are queued before their bytes are written: what is read here is in the queue that gRPC empties now.
    num_bytes = array.array("i", [0])
    fcntl.ioctl(wake_ups, termios.FIONREAD, num_bytes)
    if num_bytes[0] > 1:
        wake_ups.recv(num_bytes[0] - 1)
    callback(*args)
