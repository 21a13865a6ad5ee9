"""The TCP addresses that a set is reached at."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class AddressError(Exception):
    """An address is malformed, taken, or not this machine's."""


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address to listen on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def reachable(self) -> Address:
        """Where a client on this machine connects to."""
        return Address(_EVERY_INTERFACE.get(self.host, self.host), self.port)


def parse_address(text: str) -> Address:
    """Read `host:port` or `[v6]:port`. Raises AddressError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise AddressError(f"{text!r} is not host:port")
    return Address(host, int(port))


@contextmanager
def claim(address: Address, flag: str) -> Iterator[Address]:
    """Yield the address, with a free port in place of 0. Raises AddressError if nothing could listen there now.

    While the block runs, the system gives the port to nobody else, and servers can listen there.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier run that linger are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise AddressError(f"{flag}: {_why(error, address)}") from error
        yield Address(address.host, int(probe.getsockname()[1]))


def _why(error: OSError, address: Address) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {address.port} on {address.host} is taken by another program; choose another port"
    return f"cannot listen on {address}: {error.strerror}"
