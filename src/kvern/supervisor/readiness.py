"""Whether a process can do its work, asked from outside."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.services.runtime.channel import CHANNEL_OPTIONS
from kvern.services.runtime.health import WHOLE_FLEET
from kvern.supervisor.addresses import Address

_PATIENCE_S = 0.5
"""A busy process may answer late; it is asked again."""


class Probe(Protocol):
    def ready(self) -> bool:
        """Whether the process serves now. Blocks for a second at most."""


class HealthProbe:
    """Asks the standard health service."""

    def __init__(self, address: str, service: str = "") -> None:
        """service: what it is asked for. Default: the whole process."""
        self._service = service
        self._stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(address, options=CHANNEL_OPTIONS))

    def ready(self) -> bool:
        try:
            response = self._stub.Check(health_pb2.HealthCheckRequest(service=self._service), timeout=_PATIENCE_S)
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


class RouterProbe:
    """Asks a router whether it can use every replica: its own health is content with one.

    Both are asked through its health service, which answers everybody: a supervisor has no credentials.
    """

    def __init__(self, address: str) -> None:
        self._probes = [HealthProbe(address), HealthProbe(address, WHOLE_FLEET)]

    def ready(self) -> bool:
        return all(probe.ready() for probe in self._probes)


class RedisProbe:
    """Pings a Redis on a Unix socket."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ready(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_PATIENCE_S)
                connection.connect(str(self._path))
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


class PortProbe:
    """Connects to a TCP port: all that a process without a health service promises."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def ready(self) -> bool:
        try:
            with socket.create_connection((self._address.host, self._address.port), timeout=_PATIENCE_S):
                return True
        except OSError:
            return False
