"""Addresses a server listens on, and the ways in which they go wrong."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

import grpc

MAX_SOCKET_PATH_BYTES = 100
"""sockaddr_un holds 108 bytes on Linux, some systems less; gRPC truncates nothing and fails obscurely."""

_UNIX = "unix:"


class ListenError(Exception):
    """An address cannot be listened on. The message names it."""


def socket_path(address: str) -> Path | None:
    """Return the path of a `unix:/path` address, None for others."""
    return Path(address.removeprefix(_UNIX)) if address.startswith(_UNIX) else None


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> IO[bytes] | None:
    """Bind a server to one address.

    credentials: of TCP addresses; None serves without TLS. Returns an open lock file for a socket path, to be held
    while the server lives: a second server on one path would otherwise take it over without a word. Raises ListenError.
    """
    path = socket_path(address)
    lock = _lock(path) if path is not None else None
    try:
        if path is None and credentials is not None:
            server.add_secure_port(address, credentials)
        else:
            server.add_insecure_port(address)
    except RuntimeError as error:
        raise ListenError(f"listen: cannot bind {address}: it is in use, or not an address of this machine") from error
    return lock


def share_with_group(address: str) -> None:
    """Let the group connect: the containers of a pod may run as different users that share a group."""
    path = socket_path(address)
    if path is not None:
        path.chmod(0o660)


def _lock(path: Path) -> IO[bytes]:
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ListenError(
            f"listen: socket path is {len(os.fsencode(path))} bytes, at most {MAX_SOCKET_PATH_BYTES} work: {path}"
        )
    if not path.parent.is_dir():
        raise ListenError(f"listen: no such folder: {path.parent}")
    lock = open(f"{path}.lock", "ab")  # noqa: SIM115 (held until the server ends)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ListenError(f"listen: another process serves {path}") from error
    return lock
