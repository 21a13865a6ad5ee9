"""Whether a process can do its work, asked from outside."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvern.services.runtime.channel import CHANNEL_OPTIONS
from kvern.supervisor.addresses import Address
from kvern.v1.replica_pb2 import REPLICA_STATE_READY
from kvern.v1.router_pb2 import ListReplicasRequest
from kvern.v1.router_pb2_grpc import RouterServiceStub

_PATIENCE_S = 0.5
"""A busy process may answer late; it is asked again."""


class Probe(Protocol):
    def ready(self) -> bool:
        """Whether the process serves now. Blocks for a second at most."""


class HealthProbe:
    """Asks the standard health service."""

    def __init__(self, address: str) -> None:
        self._stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(address, options=CHANNEL_OPTIONS))

    def ready(self) -> bool:
        try:
            response = self._stub.Check(health_pb2.HealthCheckRequest(), timeout=_PATIENCE_S)
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


class RouterProbe:
    """Asks a router whether it can use every replica: its health is content with one."""

    def __init__(self, address: str) -> None:
        self._health = HealthProbe(address)
        self._stub = RouterServiceStub(grpc.insecure_channel(address, options=CHANNEL_OPTIONS))

    def ready(self) -> bool:
        if not self._health.ready():
            return False
        try:
            response = self._stub.ListReplicas(ListReplicasRequest(), timeout=_PATIENCE_S)
        except grpc.RpcError:
            return False
        return all(replica.reachable and replica.state == REPLICA_STATE_READY for replica in response.replicas)


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
