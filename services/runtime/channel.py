"""How Kvern's processes talk to each other: options of channels and servers, in one place because they must agree."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import grpc

from kvern.services.runtime.listen import socket_path
from kvern.services.runtime.secure_channel import SecureChannel
from kvern.services.runtime.tls import ClientTls

MAX_RECEIVE_BYTES = 32 * 1024 * 1024
"""Largest message anybody accepts. A longer prompt is refused with RESOURCE_EXHAUSTED by gRPC itself."""

KEEPALIVE_S = 30
"""How often a client pings while it has calls in flight, in seconds."""

MIN_PING_INTERVAL_S = 10
"""Servers take more frequent pings for an attack. Below KEEPALIVE_S, or our own clients would be cut off."""

MAX_CONNECTION_AGE_S = 300
"""A connection is asked to go after this long, so that clients find new servers. Its streams run to their end."""

MAX_AUTHORIZATION_BYTES = 8 * 1024
"""Longest `authorization` that a call may bring."""

_ROUND_ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})

CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    # Without these two, a reader that stops still swallows megabytes (measured: 3 to 4 MiB against 24 KiB).
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 16384),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_permit_without_calls", 0),
    # By default it stops pinging after two pings that no data followed, just when a long prefill says nothing.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Retries are ours to decide: only we know whether something was already delivered.
    ("grpc.enable_retries", 0),
    ("grpc.service_config", _ROUND_ROBIN),
]

SERVER_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_S * 1000),
    ("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_S * 1000),
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    # gRPC's own bound, 8 KiB for all metadata together, would refuse long tokens at random.
    ("grpc.max_metadata_size", 2 * MAX_AUTHORIZATION_BYTES),
    # A second process on a port must fail, not share its calls.
    ("grpc.so_reuseport", 0),
]


def open_channel(address: str, authority: str | None = None, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """Open a channel to `host:port`, `dns:///name:port` or `unix:/path`. It connects when first used.

    authority: the name to call the server by, where its address is not the name that meshes and certificates know.
    tls: what to call with over TCP; None calls without TLS.
    """
    options = CHANNEL_OPTIONS if authority is None else [*CHANNEL_OPTIONS, ("grpc.default_authority", authority)]
    if tls is None or socket_path(address) is not None:
        return grpc.aio.insecure_channel(address, options=options)
    return SecureChannel(tls.credentials, lambda credentials: grpc.aio.secure_channel(address, credentials, options))


class _Cancellable(Protocol):
    def cancel(self) -> bool: ...


_Call = TypeVar("_Call", bound=_Cancellable)


@asynccontextmanager
async def streaming(call: _Call) -> AsyncIterator[_Call]:
    """Cancel a streaming call on every way out: leaving `async for` with break would leave it running."""
    try:
        yield call
    finally:
        call.cancel()
