"""A name server for one name."""

from __future__ import annotations

import socket
import threading
from typing import Self

_ADDRESS = b"\0\x01\0\x01"
"""Type A, class IN."""


class DnsServer:
    """Answers every question for IPv4 addresses with `addresses`, and others with nothing."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.authority = f"127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._socket.sendto(b"", self._socket.getsockname())

    def _serve(self) -> None:
        with self._socket:
            while True:
                query, sender = self._socket.recvfrom(512)
                if not query:
                    return
                self._socket.sendto(self._answer(query), sender)

    def _answer(self, query: bytes) -> bytes:
        question = query[12 : query.index(b"\0", 12) + 5]
        addresses = self.addresses if question.endswith(_ADDRESS) else []
        header = query[:2] + b"\x85\x80\0\x01" + len(addresses).to_bytes(2) + b"\0\0\0\0"
        records = [b"\xc0\x0c" + _ADDRESS + b"\0\0\0\0\0\x04" + socket.inet_aton(address) for address in addresses]
        return header + question + b"".join(records)
