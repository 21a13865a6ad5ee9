"""A wire between client and server that can be cut, and that counts what is hidden from both."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self

_PREFACE_BYTES = 24
_HEADER_BYTES = 9
_PING = 6
_ACK = 1


class Proxy:
    """Passes TCP connections on to an address."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self.pings = PingCounter()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """End all connections of now, without a word to either side."""
        while self._sockets:
            with contextlib.suppress(OSError), self._sockets.pop() as ended:
                ended.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                for source, sink, watch in ((client, server, self.pings.feed), (server, client, _ignore)):
                    threading.Thread(target=_pump, args=(source, sink, watch), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, watch: Callable[[bytes], None]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            watch(data)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def _ignore(data: bytes) -> None:
    pass


class PingCounter:
    """Counts the pings in what one client sends on one HTTP/2 connection."""

    def __init__(self) -> None:
        self._unread = b""
        self._skip = _PREFACE_BYTES
        self._count = 0
        self._changed = threading.Condition()

    def feed(self, data: bytes) -> None:
        self._unread += data
        while len(self._unread) >= self._skip + _HEADER_BYTES:
            header = self._unread[self._skip : self._skip + _HEADER_BYTES]
            self._unread = self._unread[self._skip + _HEADER_BYTES :]
            self._skip = int.from_bytes(header[:3])
            if header[3] == _PING and not header[4] & _ACK:
                with self._changed:
                    self._count += 1
                    self._changed.notify_all()

    def wait_for(self, count: int) -> bool:
        """Return whether there were so many pings before a long time passed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count >= count, timeout=30)
